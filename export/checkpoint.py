"""Find a Hugging Face checkpoint, and refuse folders and files that only look like one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
)

from runtime.files.errors import (
    OutriderError,
    convert_errors,
    first_line,
    raise_interrupt_again,
    refuse_first,
)
from runtime.files.generation import FeatureFacts
from runtime.files.graphs import file_facts
from runtime.files.progress import note

from .audio import features
from .formats import awq, compressed, gguf, gptq, llamacpp, mxfp4
from .formats.packed import DOWNLOAD, Packed, shards, unsupported

REMOVE = "Download the checkpoint again, or remove that file."  # the checkpoint does not need it
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_READ_FIRST = (  # by Transformers
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)  # fmt: skip
_ADAPTER = ("adapter_config.json", "adapter_model*")
_HUB_FILES = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.jinja", "*.model", "*.txt"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]  # of the weights, in another layout
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_READERS = {  # by quant_method
    "gptq": gptq.packed,
    "awq": awq.packed,
    "compressed-tensors": compressed.packed,
    "mxfp4": mxfp4.packed,
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    path: a folder, or a GGUF file that needs no other file. context: the longest sequence that it
    was made for, in tokens; None if unspecified. packed: how its weights are stored; None if
    Transformers reads them itself. gguf: the GGUF file that holds them, if any. features: the
    features that its encoder reads, None if it reads text or there is no encoder.
    """

    path: Path
    source: str
    config: PretrainedConfig
    context: int | None
    packed: Packed | None = None
    gguf: gguf.GgufFile | None = None
    features: FeatureFacts | None = None

    @property
    def max_len(self) -> int:
        return self.context or 1 << 20

    @property
    def text_config(self) -> PretrainedConfig:
        return self.config.get_text_config(decoder=True)

    @property
    def architecture(self) -> str:
        return _architecture(self.config)

    @property
    def has_encoder(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def files(self) -> list[Path]:
        """The files that its weights are read from, and possibly others with weights."""
        if self.gguf:
            return [self.gguf.path]
        named = self.packed or getattr(self.config, "transformers_weights", None)
        return _all_weight_files(self.path) if named else weight_files(self.path)

    def refused(self, reason: str) -> OutriderError:
        """The error that this checkpoint cannot be exported."""
        raise_interrupt_again()  # the reason may be one that torch has swallowed
        return architecture_error(self.source, self.config, reason)


def find(name: str) -> Checkpoint:
    """Find a folder, a GGUF file, or a name on the Hugging Face hub, which is downloaded to the
    hub's cache.

    Code that comes with a checkpoint is never run. Raises OutriderError "checkpoint" or
    "architecture".
    """
    if not name:
        cause = "the name of a model is empty"
        raise OutriderError("checkpoint", cause, "Give a folder, or DRAFT=none for no draft.")
    path = Path(os.path.expanduser(name))  # pathlib's expanduser raises for an unknown user
    source = os.path.basename(os.path.realpath(path))  # and its resolve for circular links
    if not path.exists():
        path, source = _fetch(name), name
    file = None if weight_files(path) else gguf.locate(name, path)
    if file is not None:
        gguf_file = gguf.read(name, file)
        config, packed_weights = llamacpp.packed(name, gguf_file)
        return Checkpoint(
            path, source, config, config.max_position_embeddings, packed_weights, gguf_file
        )
    _check_files(name, path)
    raw_config = read_raw_config(name, path)
    packed = _packed_weights(name, path, raw_config)
    named = packed or "transformers_weights" in raw_config
    if not named and not any((path / file).is_file() for file in _READ_FIRST):
        raise OutriderError(
            "checkpoint",
            f"{name} has {weight_files(path)[0].name}, but no {_READ_FIRST[0]} and no index of "
            "several files",
            "Rename the file if it has the Hugging Face layout, or download that layout.",
        )
    config = _load_config(name, path)
    text = config.get_text_config(decoder=True)
    for part in (config, text):
        vars(part).pop("quantization_config", None)  # the model is built with plain layers
    length_fields = "max_position_embeddings", "max_target_positions"
    field = next(
        (field for field in length_fields if getattr(text, field, None) is not None),
        length_fields[0],
    )
    context = getattr(text, field, None)
    if context == -1 and field not in raw_config:  # XLNet's class default: there is no limit
        context = None
    if context is not None and (type(context) is not int or context < 1):
        raise _invalid_field(name, field, context)
    if (width := getattr(text, "vocab_size", None)) is None:
        raise architecture_error(name, config, "it has no vocabulary")
    if type(width) is not int or width < 1:
        raise _invalid_field(name, "vocab_size", width)
    if "auto_map" in raw_config:
        note(
            f"{name} comes with its own code, which is not run: Transformers' "
            f"{type(config).__name__.removesuffix('Config')} is exported instead"
        )
    try:
        audio_features = features.read(name, path) if _reads_audio(config) else None
    except features.UnsupportedFeatures as other:
        raise architecture_error(name, config, str(other)) from None
    return Checkpoint(path, source, config, context, packed, features=audio_features)


def generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """Read generation_config.json; None if there is none. Raises OutriderError "checkpoint"."""
    file = "generation_config.json"
    if not (checkpoint.path / file).is_file():
        return None
    with convert_errors("checkpoint", f"{checkpoint.source}/{file} cannot be read", REMOVE):
        return GenerationConfig.from_pretrained(checkpoint.path)


def check_token_ids(checkpoint: Checkpoint, ids: Iterable[int]) -> None:
    """Raise ValueError if a generation config names a token that the model does not have."""
    width = checkpoint.vocab_size
    if invalid := [token for token in ids if not 0 <= token < width]:
        raise ValueError(f"generation_config names token {invalid[0]}, but the model has {width}")


def _reads_audio(config: PretrainedConfig) -> bool:
    return bool(config.is_encoder_decoder) and type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def _load_config(name: str, path: Path) -> PretrainedConfig:
    config: PretrainedConfig
    what = f"Transformers {transformers.__version__} cannot read {name}/config.json"
    remedy = "Correct that file, or use a checkpoint of an architecture that this version knows."
    with convert_errors("architecture", what, remedy):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        of_text = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        if config.is_encoder_decoder and not of_text and not _reads_audio(config):
            raise architecture_error(name, config, "its encoder reads neither text nor audio")
        config.get_text_config(decoder=True)
    return config


def _packed_weights(name: str, path: Path, raw_config: dict[str, Any]) -> Packed | None:
    """How the weights are packed, None if they are not. Raises OutriderError "checkpoint" for a
    format that is not supported."""
    field, parts = "quantization_config", (raw_config, raw_config.get("text_config"))
    found = [part[field] for part in parts if isinstance(part, dict) and part.get(field)]
    if not found:
        return None
    quantised = found[0]
    method = str(quantised.get("quant_method") if isinstance(quantised, dict) else quantised)
    if method == "None" and ("load_in_8bit" in quantised or "load_in_4bit" in quantised):
        method = "bitsandbytes"  # before it named itself
    if method == "None":
        raise unsupported(name, "quantization_config without quant_method")
    if method not in _READERS:
        raise unsupported(name, f"quantization_config: {method[:40]}")
    try:
        packed = _READERS[method](name, path, quantised)
    except (AttributeError, KeyError, TypeError, ValueError):  # fields of unexpected types
        raise _invalid_field(name, field, quantised) from None
    if packed.remark:
        note(f"{name}: {packed.remark}")
    return packed


# Configuration fields that do not affect the encoder, as parts of their names.
_IRRELEVANT_TO_ENCODERS = (
    "decoder", "drop", "bos_token", "eos_token", "suppress", "init", "_name", "version", "dtype",
    "architectures", "num_hidden_layers", "cache", "max_length", "max_target", "mask_", "median",
    "apply_spec", "task_specific", "label", "classif", "proj_size", "tie_", "output_past", "beam",
    "prefix", "min_length", "penalty", "early_stopping", "no_repeat",
)  # fmt: skip


def has_same_encoder(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether both have the same encoder: the same weights in the files, the same configuration.

    A difference that would not matter counts too: each model then runs its own encoder.
    """
    fields = [
        {
            name: value
            for name, value in checkpoint.config.to_dict().items()
            if not any(part in name for part in _IRRELEVANT_TO_ENCODERS)
        }
        for checkpoint in (first, second)
    ]
    if fields[0] != fields[1]:
        return False
    digests = [_encoder_digests(checkpoint) for checkpoint in (first, second)]
    return bool(digests[0]) and digests[0] == digests[1]


def _encoder_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests of an encoder's weights as float32, the embedding included, by name. Empty if they
    are not in safetensors files, or if a tied embedding is stored under another name."""
    digests = {}
    for file in checkpoint.files:
        if file.suffix != ".safetensors":
            return {}
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                parts = name.removeprefix("model.").split(".")
                if parts[0] in ("encoder", "shared"):
                    numbers = tensors.get_tensor(name).float().numpy()
                    digests[".".join(parts)] = hashlib.sha256(numbers.tobytes()).hexdigest()
    has_embedding = any(name.endswith(("shared.weight", "embed_tokens.weight")) for name in digests)
    return digests if has_embedding or checkpoint.features else {}


def _check_files(name: str, path: Path) -> None:
    """Raise OutriderError "checkpoint" unless the folder holds a complete, readable model."""
    weights = weight_files(path)
    has_adapter = any(file for pattern in _ADAPTER for file in path.glob(pattern))
    refuse_first([
        (has_adapter and weights,
         f"{name} has a PEFT adapter beside its weights, so which of the two to use is ambiguous",
         "Merge the adapter first (merge_and_unload), or move its adapter_* files away."),
        (has_adapter, f"{name} is a PEFT adapter, not a complete model",
         "Merge the adapter first: load it with its base model, merge_and_unload, save."),
        (not (path / "config.json").is_file(), f"{name} has no config.json",
         "Point MODEL and DRAFT at a folder in the Hugging Face layout."),
        (not weights, f"{name} has no weights (*.safetensors or pytorch_model*.bin)",
         "Download the checkpoint completely."),
    ], "checkpoint")  # fmt: skip
    for file in (path / "config.json", *weights, *path.glob("tokenizer*.*")):
        try:
            with file.open("rb") as content:
                pointer = content.read(len(_LFS_POINTER)) == _LFS_POINTER
        except OSError as error:
            cause = f"{name}/{file.name} cannot be read: {error.strerror}"
            raise OutriderError("checkpoint", cause, "Make it readable for this user.") from None
        if pointer:
            raise OutriderError(
                "checkpoint",
                f"{name}/{file.name} is a git-LFS pointer, not the file itself",
                "Fetch the files: git lfs pull, or hf download.",
            )


def read_raw_config(name: str, path: Path) -> dict[str, Any]:
    """Read config.json as written, and refuse fields that Transformers would ignore or ask about.
    Raises OutriderError "checkpoint", "architecture"."""
    with convert_errors("checkpoint", f"{name}/config.json cannot be read", DOWNLOAD):
        raw_config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if not isinstance(raw_config, dict):
        raise OutriderError("checkpoint", f"{name}/config.json is not a JSON object", DOWNLOAD)
    names = raw_config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(type(n) is str for n in names)):
        raise _invalid_field(name, "architectures", names)
    if "auto_map" in raw_config and raw_config.get("model_type") not in CONFIG_MAPPING:
        raise OutriderError(
            "architecture",
            f"{name} requires its own code (auto_map in its config.json), which is never run",
            "Use a checkpoint of an architecture that Transformers knows.",
        )
    return raw_config


def _invalid_field(name: str, field: str, value: object) -> OutriderError:
    return OutriderError(
        "checkpoint",
        f"{name}/config.json has {field} = {repr(value)[:60]}",
        "Download the checkpoint again, or correct that field.",
    )


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    remedy = "Give a folder in the Hugging Face layout, or a hub name that can be reached."
    if name.endswith(".gguf"):
        raise OutriderError("checkpoint", f"{name} is not a file", remedy)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise OutriderError("checkpoint", f"{name} is not a folder", remedy)
    try:
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = f"{name} is not a folder and could not be fetched: {first_line(error)}"
        raise OutriderError("checkpoint", cause, remedy) from None


def weight_files(path: Path) -> list[Path]:
    """The weight files that Transformers reads, by their names; all if none has such a name."""
    first = next((path / name for name in _READ_FIRST if (path / name).is_file()), None)
    if first is None:
        return _all_weight_files(path)
    if first.suffix != ".json":
        return [first]
    with suppress(ValueError, KeyError, AttributeError, TypeError):  # `load` reports a broken index
        return [file for file in shards(first) if file.is_file()]
    return _all_weight_files(path)


def _all_weight_files(path: Path) -> list[Path]:
    """All weight files except an adapter's."""
    files = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    return [file for file in files if not file.name.startswith("adapter_")]


def content_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of every file that decides what the graph computes: no code, which is never run."""
    if checkpoint.gguf:
        files = checkpoint.files
    else:
        indexes = sorted(checkpoint.path.glob("*.index.json"))
        files = [checkpoint.path / "config.json", *indexes, *checkpoint.files]
        if checkpoint.features:
            files += sorted(checkpoint.path.glob("p*processor_config.json"))
    return {path.name: file_facts(path).sha256 for path in files}


def _architecture(config: PretrainedConfig) -> str:
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def architecture_error(name: str, config: PretrainedConfig, reason: str) -> OutriderError:
    return OutriderError(
        "architecture",
        f"{name} is a {_architecture(config)}, which cannot be exported: {reason}",
        "Use a checkpoint of another architecture: docs/checkpoints.md lists them.",
    )
