"""GGUF files written as llama.cpp's converters do, with random blocks and their dense values."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import EOS, TOKENS
from safetensors.torch import load_file

Rng = np.random.Generator
Block = Callable[[Rng], tuple[bytes, np.ndarray]]  # bytes, and the float32 numbers that they encode


def _half(number: float) -> tuple[bytes, np.float32]:
    half = np.float16(number)
    return half.tobytes(), np.float32(half)


def _nibbles(levels: np.ndarray) -> bytes:
    """32 levels of 4 bits: the first half in the low nibbles."""
    return (levels[:16] | levels[16:] << 4).astype(np.uint8).tobytes()


def _q8_0(rng: Rng) -> tuple[bytes, np.ndarray]:
    data, d = _half(rng.uniform(0.001, 0.01))
    levels = rng.integers(-127, 128, 32)
    return data + levels.astype(np.int8).tobytes(), d * levels.astype(np.float32)


def _blocks_of_32(bits: int, *, least: bool) -> Block:
    """Q4_0 to Q5_1. least: blocks store their minimum, instead of levels centred on 0."""

    def block(rng: Rng) -> tuple[bytes, np.ndarray]:
        data, d = _half(rng.uniform(0.001, 0.01) * (1 if least else rng.choice([-1, 1])))
        more, m = _half(rng.uniform(-0.1, 0)) if least else (b"", np.float32(0))
        levels = rng.integers(0, 2**bits, 32)
        fifth = sum(int(level >> 4) << place for place, level in enumerate(levels))
        content = (struct.pack("<I", fifth) if bits == 5 else b"") + _nibbles(levels & 15)
        middle = 0 if least else 2 ** (bits - 1)
        return data + more + content, d * (levels - middle).astype(np.float32) + m

    return block


def _q4_k(rng: Rng) -> tuple[bytes, np.ndarray]:
    (data, d), (least, m) = _half(rng.uniform(1e-4, 1e-3)), _half(rng.uniform(1e-4, 1e-3))
    high, low = rng.integers(0, 64, (2, 8))  # of the eight sub-blocks
    packed = np.zeros(12, np.uint8)
    for j in range(4):
        packed[j] = high[j] | (high[j + 4] >> 4) << 6
        packed[j + 4] = low[j] | (low[j + 4] >> 4) << 6
        packed[j + 8] = (high[j + 4] & 15) | (low[j + 4] & 15) << 4
    levels = rng.integers(0, 16, (8, 32))
    content = b"".join(
        (levels[j] | levels[j + 1] << 4).astype(np.uint8).tobytes() for j in range(0, 8, 2)
    )
    values = [d * np.float32(high[j]) * levels[j] - m * np.float32(low[j]) for j in range(8)]
    return data + least + packed.tobytes() + content, np.concatenate(values).astype(np.float32)


def _q6_k(rng: Rng) -> tuple[bytes, np.ndarray]:
    data, d = _half(rng.uniform(1e-4, 1e-3))
    factors = rng.integers(-64, 64, 16)
    levels = rng.integers(0, 64, 256)
    low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
    for at, level in enumerate(levels):
        half, quarter, l = at // 128, at % 128 // 32, at % 32  # noqa: E741 - llama.cpp's name
        low[64 * half + l + 32 * (quarter % 2)] |= (level & 15) << (4 * (quarter // 2))
        high[32 * half + l] |= (level >> 4) << (2 * quarter)
    values = d * np.repeat(factors, 16).astype(np.float32) * (levels - 32).astype(np.float32)
    return low.tobytes() + high.tobytes() + factors.astype(np.int8).tobytes() + data, values


GGML = {
    "Q4_0": (2, _blocks_of_32(4, least=False)), "Q4_1": (3, _blocks_of_32(4, least=True)),
    "Q5_0": (6, _blocks_of_32(5, least=False)), "Q5_1": (7, _blocks_of_32(5, least=True)),
    "Q8_0": (8, _q8_0), "Q4_K": (12, _q4_k), "Q6_K": (14, _q6_k),
}  # fmt: skip
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
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


def _name(name: str, family: str) -> str:
    if family.startswith("gemma"):
        name = name.replace("post_attention_layernorm", "post_attention_norm")
    for hf, gguf in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm")):
        name = name.replace(hf, gguf)
    name = name.replace("lm_head", "output").replace("model.layers.", "blk.")
    for hf, gguf in _LAYER.items():
        name = name.replace(f".{hf}.", f".{gguf}.")
    return name


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


def write(
    file: Path, source: Path, kind: str = "F32", *, more: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write the checkpoint as llama.cpp's converter would, with random blocks of this kind in the
    projections whose rows are whole blocks. more, tensors: additional metadata and tensors; a key
    set to None is left out. Returns the dense tensors that the file encodes, under Transformers'
    names except for experts, which are stacked."""
    config = json.loads((source / "config.json").read_text())
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    family = _ARCHITECTURE.get(config["model_type"], config["model_type"])
    dense = _stacked(load_file(source / "model.safetensors"))
    rng, written = np.random.default_rng(4), {}
    for name, tensor in dense.items():
        stored = tensor.float().numpy()
        turned = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
        turned = turned if family in _PAIRS_NEIGHBOURS else None
        number, block = GGML.get(kind, (0, None))
        if block and name.endswith("proj.weight") and stored.shape[-1] % len(block(rng)[1]) == 0:
            each = len(block(rng)[1])
            blocks = [block(rng) for _ in range(stored.size // each)]
            data = b"".join(content for content, _ in blocks)
            stored = np.concatenate([values for _, values in blocks]).reshape(stored.shape)
            dense[name] = torch.from_numpy(_halves(stored, turned) if turned else stored)
        else:
            if family.startswith("gemma") and name.endswith("norm.weight"):
                stored = stored + 1
            number, data = 0, (neighbours(stored, turned) if turned else stored).tobytes()
        written[_name(name, family)] = (number, tensor.shape, data)
    for length in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        table = np.float32(rope[f"{length}_factor"])
        written[f"rope_factors_{length}.weight"] = (0, table.shape, table.tobytes())
    for name, table in (tensors or {}).items():
        written[name] = (0, table.shape, table.astype(np.float32).tobytes())
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
    present = {key: value for key, value in metadata.items() if value is not None}
    file.write_bytes(_gguf_bytes(present, written))
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


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    kind = struct.unpack("<I", _value(value[0])[:4])[0] if value else 8
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_value(item)[4:] for item in value)


def _gguf_bytes(metadata: dict[str, Any], tensors: dict[str, tuple[int, Any, bytes]]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += _string(name) + struct.pack("<I", len(shape)) + sizes
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
    return head + b"\0" * (-len(head) % 32) + body
