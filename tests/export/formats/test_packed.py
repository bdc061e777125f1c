"""Checkpoints that are already quantised: the loaded weights are bitwise those that they encode,
and blocks are recovered from them. Damaged ones are refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from dense import SIZES, bytes_per_number, different, loaded, recovers
from exported import Refused, edit_weights
from safetensors.torch import save_file
from workshop import Workshop

from export.checkpoint import find
from export.loading import load
from export.weights.blocks import RANGE, Quantised, recover
from export.weights.layers import Table
from export.weights.stored import load_as_stored


def compressed(bits: int, layout: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}}
    if layout == "int-quantized":
        scheme["input_activations"] = {"num_bits": 8, "dynamic": True}
    groups = {"config_groups": {"group_0": scheme}}
    return {"quant_method": "compressed-tensors", "format": layout, **groups}


GPTQ = {"quant_method": "gptq", "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
PACK = "pack-quantized"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
FLOAT8 = {"type": "float", "strategy": "channel"}
# The packer, the configuration, words of the description, and the bits that are lossless.
FOLDERS: dict[str, tuple[packers.Packer, dict[str, Any], str, int | None]] = {
    "GPTQ, 4 bits": (
        packers.gptq(4, 64, symmetric=True), {**GPTQ, "bits": 4, "group_size": 64},
        "GPTQ, 4 bits, groups of 64", 4,
    ),
    "GPTQ, zero points": (
        packers.gptq(4, 32, symmetric=False), {**GPTQ, "bits": 4, "group_size": 32, "sym": False},
        "GPTQ, 4 bits, groups of 32", 8,
    ),
    "GPTQ, columns out of order": (
        packers.gptq(4, 32, symmetric=True, shuffled=True),
        {**GPTQ, "bits": 4, "group_size": 32, "desc_act": True}, "columns out of order", None,
    ),
    "GPTQ, second layout": (
        packers.gptq(4, 32, symmetric=False, less=0),
        {**GPTQ, "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}, "GPTQ", 8,
    ),
    "GPTQ, 8 bits": (
        packers.gptq(8, 32, symmetric=False), {**GPTQ, "bits": 8, "group_size": 32},
        "GPTQ, 8 bits, groups of 32", None,
    ),
    "AWQ": (packers.awq(32), AWQ, "AWQ, 4 bits, groups of 32", 8),
    "compressed-tensors, 4 bits": (
        packers.compressed(4, 32), compressed(4, PACK, group_size=32, strategy="group"),
        "compressed-tensors, 4 bits, groups of 32", 4,
    ),
    "compressed-tensors, zero points": (
        packers.compressed(4, 32, symmetric=False),
        compressed(4, PACK, group_size=32, strategy="group", symmetric=False), "zero points", 8,
    ),
    "compressed-tensors, columns out of order": (
        packers.compressed(4, 32, shuffled=True),
        compressed(4, PACK, group_size=32, strategy="group", actorder="group"), "4 bits", None,
    ),
    "compressed-tensors, 8 bits": (
        packers.compressed(8, None, symmetric=False),
        compressed(8, PACK, strategy="channel", symmetric=False), "scale for each channel", None,
    ),
    "compressed-tensors, int8": (
        packers.compressed(8, None, packed=False),
        compressed(8, "int-quantized", strategy="channel"), "compressed-tensors, 8 bits", 8,
    ),
    "compressed-tensors, int8 with zero points": (
        packers.compressed(8, 64, packed=False, symmetric=False),
        compressed(8, "int-quantized", strategy="group", group_size=64), "8 bits, groups", None,
    ),
    "compressed-tensors, float8": (
        packers.float8(None), compressed(8, "float-quantized", **FLOAT8), "float8", None,
    ),
    "compressed-tensors, float8 in squares": (
        packers.float8(32),
        compressed(8, "float-quantized", type="float", strategy="block", block_structure=[32, 32]),
        "float8, a scale for each block", None,
    ),
    "compressed-tensors, float8 in squares that end early": (
        packers.float8(48),
        compressed(8, "float-quantized", type="float", strategy="block", block_structure=[48, 48]),
        "float8, a scale for each block", None,
    ),
}  # fmt: skip

# 8 bits with zero points: the differences need nine bits.
TWO_BYTES = {
    "GPTQ, 8 bits", "compressed-tensors, 8 bits", "compressed-tensors, int8 with zero points",
}  # fmt: skip


@pytest.mark.parametrize("what", FOLDERS)
def test_folders(
    source: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packer, config, words, exact = FOLDERS[what]
    dense = packers.write(tmp_path / "packed", source, packer, **config)
    found = find(str(tmp_path / "packed"))
    assert found.packed and words in str(found.packed)
    assert found.packed.bits == (4 if exact == 4 or "4 bits" in str(found.packed) else 8)
    is_noted = "quantisation of its activations or cache" in capsys.readouterr().err
    assert is_noted == (config.get("format") == "int-quantized")
    tensors = loaded(tmp_path / "packed")
    assert different(tensors, dense) == []
    assert bytes_per_number(found, dense) == {2 if what in TWO_BYTES else 1}
    for bits in (4, 8):
        some = (name for name in tensors if "q_proj" in name or "down_proj" in name)
        recovered = [recovers(tensors[name], bits) for name in some]
        assert all(recovered) if exact and bits >= exact else not any(recovered)


def test_the_experts_of_gpt_oss(workshop: Workshop, tmp_path: Path) -> None:
    """8 bits reproduce the experts exactly; they are held in 16 bits."""
    dense = packers.mxfp4(tmp_path / "packed", workshop.checkpoint("gpt-oss"))
    found = find(str(tmp_path / "packed"))
    assert str(found.packed) == "MXFP4, 4 bits of floating point, groups of 32"
    tensors = loaded(tmp_path / "packed")
    assert different(tensors, dense) == []
    packed = [tensor for name, tensor in tensors.items() if tensor.dim() == 3]
    assert len(packed) == 4
    for experts in packed:
        rows = experts.transpose(1, 2).flatten(0, 1).contiguous()
        assert recovers(rows, 8) and not recovers(rows, 4)
    narrow = dict(load_as_stored(found).named_parameters())
    assert sum(weight.dtype == torch.bfloat16 for weight in narrow.values()) == 4
    kept = sum(isinstance(weight, Table) for weight in narrow.values())
    assert kept == 8 + 2 + 2 + 4  # projections, routers, ends, and the biases of experts
    assert different({name: weight.float() for name, weight in narrow.items()}, dense) == []
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    del config["dtype"]  # as published
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    again = load_as_stored(find(str(tmp_path / "packed"))).named_parameters()
    assert {name: weight.dtype for name, weight in again} == {
        name: weight.dtype for name, weight in narrow.items()
    }


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda w: w[EXPERTS + "_scales"].fill_(255), "_scales contains NaN"),
        (lambda w: w.update({EXPERTS: torch.ones(1)}), "twice, packed and not"),
        (lambda w: w.pop(EXPERTS + "_scales"), "it lacks"),
        (
            lambda w: w.update({EXPERTS + "_scales": w[EXPERTS + "_scales"][..., :-1].clone()}),
            "_scales is U8 [4, 64, 2] instead of U8 [4, 64, 3]",
        ),
        (lambda w: w.update({EXPERTS + "_blocks": torch.ones(3)}), "_blocks is F32 [3]"),
    ],
)
def test_damaged_experts(
    workshop: Workshop, tmp_path: Path, damage: Any, words: str, refused: Refused
) -> None:
    packers.mxfp4(tmp_path / "packed", workshop.checkpoint("gpt-oss"))
    edit_weights(tmp_path / "packed", damage)
    assert words in refused(tmp_path / "packed")


def test_the_packed_text_of_a_model_that_sees(workshop: Workshop, tmp_path: Path) -> None:
    """Tensor names in its files differ from those of the model."""
    source = workshop.checkpoint("qwen2.5-vl", **SIZES)
    packer, config, *_ = FOLDERS["GPTQ, 4 bits"]
    dense = packers.write(tmp_path / "packed", source, packer, **config)
    shutil.copytree(source, tmp_path / "dense")
    save_file(dense, tmp_path / "dense/model.safetensors", {"format": "pt"})
    wanted = loaded(tmp_path / "dense")
    assert different(loaded(tmp_path / "packed"), wanted) == []
    assert different(loaded(source), wanted) != []
    sees = json.loads((tmp_path / "packed/config.json").read_text())
    sees["text_config"]["quantization_config"] = sees.pop("quantization_config")
    (tmp_path / "packed/config.json").write_text(json.dumps(sees))
    # Fault: GPTQModel was asked for.
    assert different(loaded(tmp_path / "packed"), wanted) == []
    assert not any("visual" in name for name in wanted)  # the vision part is dropped


def test_packed_experts_become_dense(workshop: Workshop, tmp_path: Path) -> None:
    """Transformers has the experts of a layer in one tensor."""
    packer, config, *_ = FOLDERS["GPTQ, zero points"]
    packers.write(tmp_path / "packed", workshop.checkpoint("qwen3-moe"), packer, **config)
    found = find(str(tmp_path / "packed"))
    kept, wide = load_as_stored(found), load(found, torch.float32)
    assert all(map(torch.equal, wide.parameters(), kept.parameters()))
    assert {weight.dim() for weight in kept.parameters() if not isinstance(weight, Table)} == {1, 3}


def test_the_name_that_autogptq_gave_its_files(source: Path, tmp_path: Path) -> None:
    """Faults: refused, as Transformers would not read a file of this name; a file of the usual name
    was refused if another one lay beside it."""
    packer, config, *_ = FOLDERS["GPTQ, 4 bits"]
    packed = tmp_path / "packed"
    dense = packers.write(packed, source, packer, **config)
    (packed / "consolidated.safetensors").write_bytes(b"")
    assert different(loaded(packed), dense) == []
    (packed / "consolidated.safetensors").unlink()
    (packed / "model.safetensors").rename(packed / "gptq_model-4bit-32g.safetensors")
    assert different(loaded(packed), dense) == []


def test_the_biases_that_autogptq_gave_to_every_matrix(
    source: Path, tmp_path: Path, refused: Refused
) -> None:
    """Fault: refused, although they are zero. Any other bias still is."""
    packer, config, *_ = FOLDERS["GPTQ, 4 bits"]
    packed = tmp_path / "packed"
    dense = packers.write(packed, source, packer, **config)
    biases = {f"{PROJ}bias": torch.zeros(64), "model.layers.0.mlp.up_proj.bias": torch.zeros(256)}
    edit_weights(packed, lambda w: w.update(biases))
    assert different(loaded(packed), dense) == []
    edit_weights(packed, lambda w: w[f"{PROJ}bias"].__setitem__(7, 0.5))
    assert f"has 1 weights that are not part of a LlamaForCausalLM ({PROJ}bias" in refused(packed)


def test_a_changed_nibble_is_another_model(source: Path, tmp_path: Path) -> None:
    """Control of the tests above."""
    packer, config, *_ = FOLDERS["GPTQ, 4 bits"]
    packed = tmp_path / "packed"
    dense = packers.write(packed, source, packer, **config)
    edit_weights(packed, lambda w: w[WORDS].__setitem__((0, 0), w[WORDS][0, 0] ^ 1 << 8))
    assert different(loaded(packed), dense) == [WORDS.replace("qweight", "weight")]


# Recovery


@pytest.mark.parametrize("bits", [4, 8])
def test_recovery(bits: Any) -> None:
    """Partial blocks, zeros, tiny and negative scales, and largest levels of all sizes."""
    rng = np.random.default_rng(bits)
    low, high = RANGE[bits]
    levels = rng.integers(low, high + 1, (40, 90)) // rng.integers(1, high, (40, 1))
    levels[3] = 0
    scales = (rng.standard_normal((40, 3)) * 10.0 ** -rng.integers(0, 6, (40, 3))).astype(
        np.float16
    )
    dense = Quantised(levels.astype(np.int8), scales, bits).dense()
    found = recover(dense, bits)
    assert found is not None and np.array_equal(found.dense(), dense)
    assert found.levels.min() >= low and found.levels.max() <= high
    for wrong in (np.nextafter(dense[7, 80], np.float32(9)), np.nan, np.inf):
        damaged = dense.copy()
        damaged[7, 80] = wrong
        assert recover(damaged, bits) is None
    assert recover(rng.standard_normal((40, 90)).astype(np.float32), bits) is None


# Damaged checkpoints, and unsupported formats

PROJ = "model.layers.0.self_attn.q_proj."
WORDS = PROJ + "qweight"
Edit = Callable[[dict[str, torch.Tensor]], object]


def _without(part: str) -> Edit:
    return lambda weights: weights.pop(PROJ + part)


def _shorter(part: str) -> Edit:
    return lambda weights: weights.update({PROJ + part: weights[PROJ + part][:-1].clone()})


def _as(part: str, dtype: torch.dtype) -> Edit:
    return lambda weights: weights.update({PROJ + part: weights[PROJ + part].to(dtype)})


def _single(part: str) -> Edit:
    return lambda weights: weights.update({PROJ + part: weights[PROJ + part].flatten()[0].clone()})


DAMAGED: dict[str, tuple[str, Edit, str]] = {
    "no scales": ("GPTQ, 4 bits", _without("scales"), f"it lacks {PROJ}scales"),
    "no zero points": ("AWQ", _without("qzeros"), f"it lacks {PROJ}qzeros"),
    "no words": ("GPTQ, 4 bits", _without("qweight"), "I32 without a scale"),
    "a group too many": (
        "GPTQ, 4 bits", lambda w: w[PROJ + "g_idx"].fill_(1), "g_idx names groups outside the 1",
    ),
    "a row too few": ("GPTQ, 4 bits", _shorter("qweight"), "qweight"),
    "a column too few": ("GPTQ, 4 bits", _shorter("g_idx"), "qweight"),
    "scales too few": (
        "AWQ", _shorter("scales"), f"{PROJ}qzeros is I32 [2, 8] instead of I32 [1, 8]"
    ),
    "words of 64 bits": ("AWQ", _as("qweight", torch.int64), "is I64 [64, 8]"),
    "three bits": (
        "GPTQ, 4 bits",
        lambda w: w.update({WORDS: w[WORDS][:6].clone()}),
        "qweight has 3 bits per weight",
    ),
    "one word": ("GPTQ, 4 bits", _single("qweight"), "qweight has 0 bits per weight"),
    "one group": ("GPTQ, 4 bits", _single("g_idx"), "qweight has"),
    "one scale": ("GPTQ, 4 bits", _single("scales"), "qzeros is I32 [1, 8] instead of I32 [0, 8]"),
    "one word of AWQ": ("AWQ", _single("qweight"), "qweight is I32 [] instead of I32 [0, 8]"),
    "one scale of AWQ": ("AWQ", _single("scales"), "qweight is I32 [64, 8] instead of"),
    "no shape": ("compressed-tensors, 4 bits", _without("weight_shape"), "lacks"),
    "int8 without scales": (
        "compressed-tensors, int8", _without("weight_scale"), "weight is I8 without a scale",
    ),
    "another shape": (
        "compressed-tensors, 4 bits",
        lambda w: w[PROJ + "weight_shape"].fill_(99), "weight_packed is [64, 8] for 99 x 99",
    ),
    "scales that do not divide": (
        "compressed-tensors, 4 bits",
        lambda w: w.update({PROJ + "weight_scale": torch.ones(64, 3)}), "3 groups for 64 columns",
    ),
    "a weight beside its words": (
        "AWQ", lambda w: w.update({PROJ + "weight_scale": torch.ones(1)}), "weight_scale first",
    ),
    "a layer too many": (
        "AWQ", lambda w: w.update({"model.layers.9.mlp.up_proj.bias": torch.ones(1)}), "layers.9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_folders(source: Path, tmp_path: Path, what: str, refused: Refused) -> None:
    which, edit, words = DAMAGED[what]
    packer, config, *_ = FOLDERS[which]
    packers.write(tmp_path / "packed", source, packer, **config)
    edit_weights(tmp_path / "packed", edit)
    assert words in refused(tmp_path / "packed")


def test_truncated_folders(source: Path, tmp_path: Path, refused: Refused) -> None:
    packers.write(tmp_path / "packed", source, packers.awq(32), **AWQ)
    weights = tmp_path / "packed" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refused(tmp_path / "packed")


NOT_READ: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    "HQQ": ({"quant_method": "hqq", "bits": 4}, "quantization_config: hqq"),
    "GPTQ of 3 bits": ({**GPTQ, "bits": 3}, "GPTQ with bits = 3"),
    "GPTQ for Marlin": ({**GPTQ, "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
    "AWQ in another layout": ({**AWQ, "version": "gemv_fast"}, "layout 'gemv_fast'"),
    "float4": (compressed(4, "nvfp4-pack-quantized", type="float"), "nvfp4-pack-quantized"),
    "2:4": ({**compressed(4, PACK), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    "2 bits": (compressed(2, PACK), "compressed-tensors with int of 2 bits"),
    "rotations": (
        {**compressed(4, PACK), "transform_config": {"config_groups": {"u": {}}}}, "rotations",
    ),
    "no table": ({"quant_method": "gptq", "bits": []}, "GPTQ with bits = []"),
    "no words": ({**compressed(4, PACK), "sparsity_config": "2:4"}, "has quantization_config ="),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups = None"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_READ)
def test_formats_that_are_not_read(
    source: Path, tmp_path: Path, what: str, refused: Refused
) -> None:
    config, words = NOT_READ[what]
    packers.write(tmp_path / "packed", source, FOLDERS["AWQ"][0], **config)
    assert words in refused(tmp_path / "packed")
