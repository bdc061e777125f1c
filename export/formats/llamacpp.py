"""Translate llama.cpp's keys and names to Transformers' configuration and weights.

Metadata that `families` does not cover is refused by name: silently ignoring a factor would give
another model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.files.errors import OutriderError, first_line

from .families import FAMILIES, KEYS, LAYER, TENSORS, Family
from .gguf import TOKENS, GgufFile
from .packed import Lazy, Packed, PackedModule, Reordered, damaged, modules

_DERIVED = {"num_key_value_heads", "head_dim", "original_max_position_embeddings"}
_NOTHING = (0, "", "none")
_EXPECTED = {"attention.causal": (True,), "rope.scaling.finetuned": (True,)}
_FACTORS = "rope_freqs.weight"
# Tokens that end a turn or a text. A file names one of them, generation_config.json all of them.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>",
}  # fmt: skip
_LONG = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def packed(name: str, file: GgufFile) -> tuple[PretrainedConfig, Packed]:
    """The configuration and weights of a GGUF file. Raises OutriderError "architecture" for a
    family that is not in the table, "checkpoint" for metadata that cannot be carried over."""
    architecture = str(file.metadata["general.architecture"])
    if architecture not in FAMILIES:
        raise OutriderError(
            "architecture",
            f"{name} is a GGUF file of {architecture!r}; supported are {', '.join(FAMILIES)}",
            "Use the checkpoint that it was made from, in the Hugging Face layout.",
        )
    family = FAMILIES[architecture]
    config = _config(name, file, family, architecture)
    details = " and ".join(file.kinds[:3])
    return config, Packed("GGUF", file.bits, details, lambda: _tensors(name, file, family, config))


def _config(name: str, file: GgufFile, family: Family, architecture: str) -> PretrainedConfig:
    said = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    keys = {**KEYS, **family.keys}  # known keys are removed from `said`; the rest is checked below
    read = {field: said.pop(key) for key, field in keys.items() if key in said}
    read = {f: value for f, value in read.items() if value != 0 or f not in family.given}
    fields = {**family.given, **read}
    if missing := sorted(set(keys.values()) - _DERIVED - fields.keys()):
        raise damaged(name, f"its metadata lacks {missing[0]}")
    _check_sizes(name, *read.values())
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    fields.setdefault("head_dim", width // heads)
    fields.setdefault("num_key_value_heads", heads)
    if family.widest is not None:
        widest = fields["num_hidden_layers"] == family.widest
        fields["query_pre_attn_scalar"] = width // heads if widest else fields["head_dim"]
    rope = _rope(name, file, family, fields, said)
    whole = dict.fromkeys(("attention.value_length", "rope.dimension_count"), (fields["head_dim"],))
    expected = {**_EXPECTED, **whole}
    said.pop("vocab_size", None)  # taken from the embedding
    for key, value in said.items():
        if value not in expected.get(key, _NOTHING):
            raise _not_carried(name, f"{architecture}.{key} = {str(value)[:40]}")
    embedding = _find(name, file, "token_embd.weight")
    named = file.tensors.keys()
    config: PretrainedConfig
    try:
        config = AutoConfig.for_model(
            family.model_type,
            **fields,
            vocab_size=embedding.shape[0],  # the vocabulary may be smaller
            rope_parameters=rope,
            tie_word_embeddings="output.weight" not in named,
            attention_bias="blk.0.attn_q.bias" in named,
            mlp_bias="blk.0.ffn_up.bias" in named,
            architectures=[family.head],
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=_ends(file) or None,
            pad_token_id=None,
        )
    except Exception as error:  # noqa: BLE001 - each configuration class validates in its own way
        raise damaged(name, f"its metadata is not valid: {first_line(error)}") from None
    if _FACTORS in named:
        if rope.keys() != {"rope_type", "rope_theta"}:
            raise _not_carried(name, f"{_FACTORS} beside another kind of rotary embedding")
        _take_factors(name, config, file.tensors[_FACTORS][...])
    return config


def _find(name: str, file: GgufFile, key: str) -> Lazy:
    if key not in file.tensors:
        raise damaged(name, f"it lacks {key}")
    return file.tensors[key]


def _ends(file: GgufFile) -> list[Any]:
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    named = [file.metadata[key] for key in keys if key in file.metadata]
    tokens = file.metadata.get(TOKENS, [])
    return named + [i for i, token in enumerate(tokens) if token in _ENDS and i not in named]


def _check_sizes(name: str, *sizes: object) -> None:
    if not all(type(size) in (int, float) and size > 0 for size in sizes):  # type: ignore[operator]
        raise _not_carried(name, "sizes that differ from layer to layer, or are not positive")


def _rope(
    name: str, file: GgufFile, family: Family, fields: dict[str, Any], said: dict[str, Any]
) -> dict[str, Any]:
    """Transformers' rope_parameters, from keys that are removed from `said`."""

    def number(key: str, default: float) -> Any:
        value = said.pop(f"rope.{key}", default)
        _check_sizes(name, value)
        return value

    rope = {"rope_type": "default", "rope_theta": number("freq_base", 10_000.0)}
    kind = said.get("rope.scaling.type", "linear")
    if family.partial:
        width = fields["head_dim"]
        turned = number("dimension_count", width)
        if turned > width or int(width * (turned / width)) != turned:
            raise _not_carried(name, f"a rotary embedding of {turned} in {width}")
        rope["partial_rotary_factor"] = turned / width
        fields.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        if not file.tensors.keys().isdisjoint(_LONG.values()):
            rope |= {"rope_type": "longrope", **_long_factors(name, file, turned // 2)}
            rope["attention_factor"] = number("scaling.attn_factor", 1.0)
    elif kind == "linear" and said.get("rope.scaling.factor"):
        rope |= {"rope_type": kind, "factor": number("scaling.factor", 1.0)}
    if rope["rope_type"] == kind:
        said.pop("rope.scaling.type", None)
    if family.local:
        near = {"rope_type": "default", "rope_theta": number("freq_base_swa", 10_000.0)}
        rope = {"full_attention": rope, "sliding_attention": near}
    return rope


def _long_factors(name: str, file: GgufFile, count: int) -> dict[str, list[float]]:
    """LongRoPE's factors; a build uses the short ones (`loading.check_length`)."""
    found = {field: _find(name, file, key)[...] for field, key in _LONG.items()}
    for field, factors in found.items():
        _check_factors(name, _LONG[field], factors, count)
    return {field: factors.tolist() for field, factors in found.items()}


def _check_factors(name: str, key: str, factors: torch.Tensor, count: int) -> None:
    if factors.shape != (count,) or not bool((factors.isfinite() & (factors > 0)).all()):
        raise damaged(name, f"{key} lacks a positive factor for each of {count} frequencies")


def _take_factors(name: str, config: PretrainedConfig, factors: torch.Tensor) -> None:
    """Recover Llama 3's rotary embedding, which llama.cpp stores as a divisor of each frequency."""
    plain = config.rope_parameters
    theta, width = plain["rope_theta"], config.head_dim
    _check_factors(name, _FACTORS, factors, width // 2)
    config.rope_parameters = {
        **plain,
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    ours, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    theirs = theta ** -(torch.arange(0, width, 2) / width) / factors
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4, atol=0):
        raise _not_carried(name, f"{_FACTORS} other than Llama 3's")


def _not_carried(name: str, what: str) -> OutriderError:
    return OutriderError(
        "checkpoint",
        f"{name} has metadata that would be lost: {what}",
        "Use the checkpoint that it was made from, in the Hugging Face layout.",
    )


def _tensors(
    name: str, file: GgufFile, family: Family, config: PretrainedConfig
) -> dict[str, Lazy]:
    """All tensors of the file, under Transformers' names and in its form."""
    found, layer = {}, {**LAYER, **family.layer}
    for key, tensor in file.tensors.items():
        if key == _FACTORS or (family.partial and key in _LONG.values()):
            continue  # part of the configuration
        as_there = _turned(key, tensor, config) if family.rotated else tensor
        if family.shifted and key.endswith("norm.weight"):
            as_there = _less_one(tensor)
        found[_renamed(key, layer)] = as_there
    for experts in modules(name, found, "gate_proj"):
        found[experts.path + "gate_up_proj"] = _joined(experts)
    return found


def _renamed(key: str, layer: dict[str, str]) -> str:
    """Transformers' name, or the old one if there is none: the model then refuses the tensor."""
    if parts := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", key):
        number, part, last = parts.groups()
        if part not in layer:
            return key
        # Stacked experts are a parameter in Transformers, without ".weight".
        stacked = part.endswith("_exps") and last == "weight"
        return f"model.layers.{number}.{layer[part]}" + ("" if stacked else f".{last}")
    part, _, last = key.rpartition(".")
    return f"{TENSORS[part]}.{last}" if part in TENSORS else key


def _less_one(norm: Lazy) -> Lazy:
    """Subtract the 1 that the model adds, in float32 as in llama.cpp's converter."""
    return Lazy(lambda: norm[...].float() - 1, norm.shape)


def _joined(experts: PackedModule) -> Lazy:
    """Join two tensors [E, F, H] to [E, 2 F, H]."""
    gate, up = map(experts.take, ("gate_proj", "up_proj"))
    count, rows, width = (*gate.shape, 0, 0, 0)[:3]
    for part, tensor in (("gate_proj", gate), ("up_proj", up)):
        experts.expect(part, tensor, {tensor.dtype}, count, rows, width)
    return Lazy(lambda: torch.cat([gate[...], up[...]], 1), (count, 2 * rows, width))


def _turned(key: str, tensor: Lazy, config: PretrainedConfig) -> Lazy:
    """Move rows 2 i and 2 i + 1 of each head to i and i + width / 2."""
    part = key.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    if heads is None:
        return tensor

    def make() -> Reordered:
        pairs = torch.arange(tensor.shape[0]).view(heads, -1, 2)
        return Reordered(tensor.stored(), pairs.transpose(1, 2).flatten())

    return Lazy(make, tensor.shape, tensor.dtype)
