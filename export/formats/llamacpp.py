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

from runtime.files.errors import OutriderError

from .families import FAMILIES, KEYS, LAYER, TENSORS, Family
from .gguf import TOKENS, GgufFile
from .packed import Lazy, Packed, PackedModule, Reordered, damage, damaged, packed_modules

_DERIVED = {"num_key_value_heads", "head_dim", "original_max_position_embeddings"}
_NEUTRAL = (0, "", "none")
_EXPECTED = {"attention.causal": (True,), "rope.scaling.finetuned": (True,)}
_ROPE_FACTORS = "rope_freqs.weight"
# Tokens that end a turn or a text. A file names one of them, generation_config.json all of them.
_END_TOKENS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>",
}  # fmt: skip
_LONG_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}


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
    metadata = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    keys = {**KEYS, **family.keys}  # known keys are removed from it; the rest is checked below
    read = {field: metadata.pop(key) for key, field in keys.items() if key in metadata}
    read = {f: value for f, value in read.items() if value != 0 or f not in family.defaults}
    fields = {**family.defaults, **read}
    if missing := sorted(set(keys.values()) - _DERIVED - fields.keys()):
        raise damaged(name, f"its metadata lacks {missing[0]}")
    _check_sizes(name, *read.values())
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    fields.setdefault("head_dim", width // heads)
    fields.setdefault("num_key_value_heads", heads)
    if family.largest_model_layers is not None:
        is_largest = fields["num_hidden_layers"] == family.largest_model_layers
        fields["query_pre_attn_scalar"] = width // heads if is_largest else fields["head_dim"]
    rope = _rope(name, file, family, fields, metadata)
    full_head = dict.fromkeys(
        ("attention.value_length", "rope.dimension_count"), (fields["head_dim"],)
    )
    expected = {**_EXPECTED, **full_head}
    metadata.pop("vocab_size", None)  # taken from the embedding
    for key, value in metadata.items():
        if value not in expected.get(key, _NEUTRAL):
            raise _lost_metadata(name, f"{architecture}.{key} = {str(value)[:40]}")
    embedding = _find_tensor(name, file, "token_embd.weight")
    tensor_names = file.tensors.keys()
    config: PretrainedConfig
    with damage(name, "its metadata is not valid"):
        config = AutoConfig.for_model(
            family.model_type,
            **fields,
            vocab_size=embedding.shape[0],  # the vocabulary may be smaller
            rope_parameters=rope,
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_up.bias" in tensor_names,
            architectures=[family.model_class],
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=_end_token_ids(file) or None,
            pad_token_id=None,
        )
    if _ROPE_FACTORS in tensor_names:
        if rope.keys() != {"rope_type", "rope_theta"}:
            raise _lost_metadata(name, f"{_ROPE_FACTORS} beside another kind of rotary embedding")
        _use_llama3_factors(name, config, file.tensors[_ROPE_FACTORS][...])
    return config


def _find_tensor(name: str, file: GgufFile, key: str) -> Lazy:
    if key not in file.tensors:
        raise damaged(name, f"it lacks {key}")
    return file.tensors[key]


def _end_token_ids(file: GgufFile) -> list[Any]:
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    named = [file.metadata[key] for key in keys if key in file.metadata]
    tokens = file.metadata.get(TOKENS, [])
    return named + [i for i, token in enumerate(tokens) if token in _END_TOKENS and i not in named]


def _check_sizes(name: str, *sizes: object) -> None:
    if not all(type(size) in (int, float) and size > 0 for size in sizes):  # type: ignore[operator]
        raise _lost_metadata(name, "sizes that differ from layer to layer, or are not positive")


def _rope(
    name: str, file: GgufFile, family: Family, fields: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Transformers' rope_parameters, from keys that are removed from `metadata`."""

    def number(key: str, default: float) -> Any:
        value = metadata.pop(f"rope.{key}", default)
        _check_sizes(name, value)
        return value

    rope = {"rope_type": "default", "rope_theta": number("freq_base", 10_000.0)}
    kind = metadata.get("rope.scaling.type", "linear")
    if family.has_partial_rope:
        width = fields["head_dim"]
        rotary_width = number("dimension_count", width)
        if rotary_width > width or int(width * (rotary_width / width)) != rotary_width:
            raise _lost_metadata(name, f"a rotary embedding of {rotary_width} in {width}")
        rope["partial_rotary_factor"] = rotary_width / width
        fields.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        if not file.tensors.keys().isdisjoint(_LONG_FACTORS.values()):
            rope |= {"rope_type": "longrope", **_long_factors(name, file, rotary_width // 2)}
            rope["attention_factor"] = number("scaling.attn_factor", 1.0)
    elif kind == "linear" and metadata.get("rope.scaling.factor"):
        rope |= {"rope_type": kind, "factor": number("scaling.factor", 1.0)}
    if rope["rope_type"] == kind:
        metadata.pop("rope.scaling.type", None)
    if family.has_local_rope:
        local_rope = {"rope_type": "default", "rope_theta": number("freq_base_swa", 10_000.0)}
        rope = {"full_attention": rope, "sliding_attention": local_rope}
    return rope


def _long_factors(name: str, file: GgufFile, count: int) -> dict[str, list[float]]:
    """LongRoPE's factors; a build uses the short ones (`loading.check_length`)."""
    found = {field: _find_tensor(name, file, key)[...] for field, key in _LONG_FACTORS.items()}
    for field, factors in found.items():
        _check_factors(name, _LONG_FACTORS[field], factors, count)
    return {field: factors.tolist() for field, factors in found.items()}


def _check_factors(name: str, key: str, factors: torch.Tensor, count: int) -> None:
    if factors.shape != (count,) or not bool((factors.isfinite() & (factors > 0)).all()):
        raise damaged(name, f"{key} lacks a positive factor for each of {count} frequencies")


def _use_llama3_factors(name: str, config: PretrainedConfig, factors: torch.Tensor) -> None:
    """Recover Llama 3's rotary embedding, which llama.cpp stores as a divisor of each frequency."""
    rope = config.rope_parameters
    theta, width = rope["rope_theta"], config.head_dim
    _check_factors(name, _ROPE_FACTORS, factors, width // 2)
    config.rope_parameters = {
        **rope,
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    actual = theta ** -(torch.arange(0, width, 2) / width) / factors
    if expected.shape != actual.shape or not torch.allclose(expected, actual, rtol=1e-4, atol=0):
        raise _lost_metadata(name, f"{_ROPE_FACTORS} other than Llama 3's")


def _lost_metadata(name: str, what: str) -> OutriderError:
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
        if key == _ROPE_FACTORS or (family.has_partial_rope and key in _LONG_FACTORS.values()):
            continue  # part of the configuration
        converted = _reordered(key, tensor, config) if family.rotates_neighbours else tensor
        if family.stores_norms_plus_one and key.endswith("norm.weight"):
            converted = _subtract_one(tensor)
        found[_renamed(key, layer)] = converted
    for experts in packed_modules(name, found, "gate_proj"):
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


def _subtract_one(norm: Lazy) -> Lazy:
    """Subtract the 1 that the model adds, in float32 as in llama.cpp's converter."""
    return Lazy(lambda: norm[...].float() - 1, norm.shape)


def _joined(experts: PackedModule) -> Lazy:
    """Join two tensors [E, F, H] to [E, 2 F, H]."""
    gate, up = map(experts.take, ("gate_proj", "up_proj"))
    count, rows, width = gate.sizes(3)
    for part, tensor in (("gate_proj", gate), ("up_proj", up)):
        experts.expect(part, tensor, {tensor.dtype}, count, rows, width)
    return Lazy(lambda: torch.cat([gate[...], up[...]], 1), (count, 2 * rows, width))


def _reordered(key: str, tensor: Lazy, config: PretrainedConfig) -> Lazy:
    """Move rows 2 i and 2 i + 1 of each head to i and i + width / 2."""
    part = key.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    if heads is None:
        return tensor

    def make() -> Reordered:
        pairs = torch.arange(tensor.shape[0]).view(heads, -1, 2)
        return Reordered(tensor.stored(), pairs.transpose(1, 2).flatten())

    return Lazy(make, tensor.shape, tensor.dtype)
