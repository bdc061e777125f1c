"""GGUF files written as llama.cpp's converters do, by its own package, with random blocks."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoints import EOS, TOKENS
from safetensors.torch import load_file

# By type: where a block has its float16 numbers.
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
           "Q6_K": [208]}  # fmt: skip
_PAIRS_NEIGHBOURS = {"llama", "granite", "smollm3"}  # rotary pairs are neighbours
_ARCHITECTURE = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}  # if not model_type
# GGUF keys by configuration field; a file has the keys whose fields are set.
_KEYS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip


def _metadata(config: dict[str, Any], family: str) -> dict[str, Any]:
    """As the converter of this family writes it."""
    rope, head = config.get("rope_parameters") or {}, config.get("head_dim")
    metadata = {key: config[field] for field, key in _KEYS.items() if config.get(field) is not None}
    if family.startswith("gemma"):
        metadata |= {"attention.key_length": head, "attention.value_length": head}
    if family.startswith("gemma") or family == "phi3":
        metadata["attention.sliding_window"] = config["sliding_window"] or 0
    if family == "gemma3":
        metadata["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if family == "phi3":
        width = config["hidden_size"] // config["num_attention_heads"]
        metadata["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * width)
    if rope.get("rope_type") == "linear":
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        more = math.log(config["max_position_embeddings"] / original) / math.log(original)
        metadata["rope.scaling.attn_factor"] = math.sqrt(1 + more)
    if family in _PAIRS_NEIGHBOURS:
        metadata["vocab_size"] = config["vocab_size"]
    metadata["rope.freq_base"] = float(rope.get("rope_theta", 10_000.0))
    return {f"{family}.{key}": value for key, value in metadata.items()}


def _stacked(dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the experts of each layer into one tensor."""
    found: dict[str, Any] = {}
    for name, tensor in dense.items():
        if ".experts." in name:
            layer, _, part = name.partition(".experts.")
            found.setdefault(f"{layer}.experts.{part.partition('.')[2]}", []).append(tensor)
        else:
            found[name] = tensor
    return {name: torch.stack(t) if isinstance(t, list) else t for name, t in found.items()}


class _Writer(gguf.GGUFWriter):
    """Also writes empty lists."""

    def _pack_val(self, val: Any, *types: Any, **others: Any) -> bytes:
        empty = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 0)
        return empty if val == [] else super()._pack_val(val, *types, **others)


def _blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random blocks, uint8 [.., bytes of a row]."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (math.prod(shape) // weights, size), np.uint8)
    if kind == "Q8_0":
        blocks[blocks == 128] = 127  # a level of -128 does not occur
    for at in _HALVES[kind]:
        halves = rng.uniform(1e-3, 1e-2, (len(blocks), 1)) * rng.choice([-1, 1], (len(blocks), 1))
        blocks[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(
    file: Path, source: Path, kind: str = "F32", *, more: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write the checkpoint as llama.cpp's converter would, with random blocks of this kind in the
    projections whose rows are whole blocks. more, tensors: metadata and tensors, additional or in
    place of these; a key set to None is left out. Returns the dense tensors that the file encodes,
    under Transformers' names except for experts, which are stacked."""
    config = json.loads((source / "config.json").read_text())
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    family = _ARCHITECTURE.get(config["model_type"], config["model_type"])
    metadata = {
        "general.architecture": family,
        **_metadata(config, family),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3 if token == EOS else 1 for token in TOKENS],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        **(more or {}),
    }
    writer = _Writer(file, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        if value is not None:
            whole = gguf.GGUFValueType.UINT32 if type(value) is int else None
            writer.add_key_value(key, value, whole or gguf.GGUFValueType.get_type(value))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    dense = _stacked(load_file(source / "model.safetensors"))
    quant, rng = gguf.GGMLQuantizationType[kind], np.random.default_rng(4)
    written: dict[str, Any] = {}
    for name, tensor in dense.items():
        stored = tensor.float().numpy()
        turned = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        turned = turned if family in _PAIRS_NEIGHBOURS else None
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if named is None:  # its maps lack output matrices that are tied elsewhere
            assert name == "lm_head.weight", name
            named = "output.weight"
        whole = stored.shape[-1] % gguf.GGML_QUANT_SIZES[quant][0] == 0
        if kind in _HALVES and name.endswith("proj.weight") and whole:
            blocks = _blocks(kind, stored.shape, rng)
            values = gguf.dequantize(blocks, quant)
            dense[name] = torch.from_numpy(_halves(values, turned) if turned else values)
            written[named] = blocks
            continue
        if family.startswith("gemma") and name.endswith("norm.weight"):
            stored = stored + 1
        written[named] = neighbours(stored, turned) if turned else stored
    factors = ("short", "long") if rope.get("rope_type") == "longrope" else ()
    tables = {f"rope_factors_{length}.weight": rope[f"{length}_factor"] for length in factors}
    written |= {name: np.float32(table) for name, table in (tables | (tensors or {})).items()}
    for name, array in written.items():
        writer.add_tensor(name, array, raw_dtype=quant if array.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: rows i and i + width / 2 of a head as neighbours."""
    turned, width = np.empty_like(rows), len(rows) // heads
    for row in range(len(rows)):
        head, i = divmod(row, width)
        half, j = divmod(i, width // 2)
        turned[head * width + 2 * j + half] = rows[row]
    return turned


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    order = neighbours(np.arange(len(rows)), heads)
    back = np.empty_like(rows)
    back[order] = rows
    return back
