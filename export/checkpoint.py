"""Finding a Hugging Face checkpoint, and refusing what only looks like one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from runtime.files.errors import OutriderError, first_line
from runtime.files.manifest import file_facts
from runtime.files.progress import note

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_ADAPTER = ("adapter_config.json", "adapter_model*")
_HUB_FILES = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.jinja", "*.model", "*.txt"]
_HUB_TWICE = ["consolidated*", "original/*"]  # the same weights in another layout
_POINTER = b"version https://git-lfs.github.com/spec/"
# What Transformers unpacks on a CPU; all other formats it would need a GPU or a package for.
_UNPACKED = ("mxfp4",)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. context: the longest sequence that it was made for, in tokens; None
    where it does not say."""

    path: Path
    source: str
    config: PretrainedConfig
    context: int | None

    @property
    def max_len(self) -> int:
        return self.context or 1 << 20

    @property
    def text_config(self) -> PretrainedConfig:
        return self.config.get_text_config(decoder=True)

    @property
    def architecture(self) -> str:
        return _architecture(self.config)


def find(name: str) -> Checkpoint:
    """A folder, or a name on the Hugging Face hub that is fetched into its cache.

    No code that a checkpoint brings along is run. Raises OutriderError "checkpoint" or
    "architecture".
    """
    path = Path(name).expanduser()
    source = path.resolve().name
    if not path.is_dir():
        path, source = _fetch(name), name
    _check_files(name, path)
    written = _read_config(name, path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise refuse_architecture(name, config, "it is an encoder-decoder model")
        text = config.get_text_config(decoder=True)
    except OutriderError:
        raise
    except OSError as error:
        raise OutriderError(
            "checkpoint",
            f"{name}/config.json cannot be read: {first_line(error)}",
            "Download the checkpoint again.",
        ) from None
    except Exception as error:  # noqa: BLE001 - each configuration class validates in its own way
        raise OutriderError(
            "architecture",
            f"Transformers {transformers.__version__} cannot read {name}/config.json: "
            + first_line(error),
            "Use a checkpoint of an architecture that this version knows.",
        ) from None
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and (type(context) is not int or context < 1):
        raise _odd_config(name, "max_position_embeddings", context)
    if type(width := getattr(text, "vocab_size", None)) is not int or width < 1:
        raise _odd_config(name, "vocab_size", width)
    if "auto_map" in written:
        note(
            f"{name} brings code of its own, which is not run: Transformers' "
            f"{type(config).__name__.removesuffix('Config')} is exported"
        )
    return Checkpoint(path, source, config, context)


def _check_files(name: str, path: Path) -> None:
    """Whether the folder holds a whole model in floating point."""
    weights = weight_files(path)
    if any(file for pattern in _ADAPTER for file in path.glob(pattern)):
        raise OutriderError(
            "checkpoint",
            f"{name} has a PEFT adapter beside its weights, and which of both is meant is not said"
            if weights
            else f"{name} is a PEFT adapter, which is no model by itself",
            "Merge the adapter first (merge_and_unload), or move its adapter_* files away."
            if weights
            else "Merge the adapter first: load it with its base model, merge_and_unload, save.",
        )
    if not weights and any(path.glob("*.gguf")):
        raise _gguf(name)
    if not (path / "config.json").is_file():
        raise OutriderError(
            "checkpoint",
            f"{name} has no config.json",
            "Point MODEL and DRAFT at a folder in the Hugging Face layout.",
        )
    if not weights:
        raise OutriderError(
            "checkpoint",
            f"{name} has no weights (*.safetensors or pytorch_model*.bin)",
            "Download the checkpoint completely.",
        )
    for file in (path / "config.json", *weights, *path.glob("tokenizer*.*")):
        try:
            with file.open("rb") as content:
                pointer = content.read(len(_POINTER)) == _POINTER
        except OSError as error:
            raise OutriderError(
                "checkpoint",
                f"{name}/{file.name} cannot be read: {error.strerror}",
                "Make it readable for this user.",
            ) from None
        if pointer:
            raise OutriderError(
                "checkpoint",
                f"{name}/{file.name} is a git-LFS pointer, not the file itself",
                "Fetch the files: git lfs pull, or hf download.",
            )


def _gguf(name: str) -> OutriderError:
    return OutriderError(
        "checkpoint",
        f"{name} is in llama.cpp's format, GGUF",
        "Use the checkpoint that it was made from, in the Hugging Face layout.",
    )


def _read_config(name: str, path: Path) -> dict[str, Any]:
    """config.json as it is written: what Transformers would ignore, or ask about, is refused."""
    try:
        written = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OutriderError(
            "checkpoint",
            f"{name}/config.json cannot be read: {first_line(error)}",
            "Download the checkpoint again.",
        ) from None
    if not isinstance(written, dict):
        raise OutriderError(
            "checkpoint",
            f"{name}/config.json is no JSON object",
            "Download the checkpoint again.",
        )
    names = written.get("architectures")
    if names is not None and not (isinstance(names, list) and all(type(n) is str for n in names)):
        raise _odd_config(name, "architectures", names)
    if "auto_map" in written and written.get("model_type") not in CONFIG_MAPPING:
        raise OutriderError(
            "architecture",
            f"{name} needs code of its own (auto_map in its config.json), which is never run",
            "Use a checkpoint of an architecture that Transformers knows.",
        )
    quantised = written.get("quantization_config")
    if quantised is not None:
        how = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        if how not in _UNPACKED:
            raise OutriderError(
                "checkpoint",
                f"{name} is quantised (quantization_config: {str(how)[:40]})",
                "Use the checkpoint that it was made from, with float weights.",
            )
    return written


def _odd_config(name: str, field: str, value: object) -> OutriderError:
    return OutriderError(
        "checkpoint",
        f"{name}/config.json has {field} = {repr(value)[:60]}",
        "Download the checkpoint again, or mend that line.",
    )


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.endswith(".gguf"):
        raise _gguf(name)
    remedy = "Give a folder in the Hugging Face layout, or a hub name that can be reached."
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise OutriderError("checkpoint", f"{name} is not a folder", remedy)
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_TWICE))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = f"{name} is not a folder and could not be fetched: {first_line(error)}"
        raise OutriderError("checkpoint", cause, remedy) from None


def weight_files(path: Path) -> list[Path]:
    """All of them but an adapter's: which ones Transformers reads is its decision."""
    files = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    return [file for file in files if not file.name.startswith("adapter_")]


def content_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of every file that decides what the graph computes; code beside them is never run."""
    indexes = sorted(checkpoint.path.glob("*.index.json"))
    files = [checkpoint.path / "config.json", *indexes, *weight_files(checkpoint.path)]
    return {path.name: file_facts(path).sha256 for path in files}


def _architecture(config: PretrainedConfig) -> str:
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def refuse_architecture(name: str, config: PretrainedConfig, reason: str) -> OutriderError:
    return OutriderError(
        "architecture",
        f"{name} is a {_architecture(config)}, which cannot be exported: {reason}",
        "Use a decoder-only checkpoint that runs on Transformers' attention interface.",
    )
