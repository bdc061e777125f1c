"""Helpers for exports: read their graphs, run the original model, run the command in-process."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import VOCAB_SIZE
from commands import leftovers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import export.__main__
import export.graph
from runtime.files.graphs import GRAPH_FILE

Refused = Callable[..., str]  # the fixture of tests/export
LAYERS = 2
TIED, UNTIED = "llama", "qwen2"
# A draft whose learned positions end before the target's.
SHORT = 48
SHORT_DRAFT = {"n_positions": SHORT, "n_layer": 1}


def graph(folder: Path, file: str = GRAPH_FILE) -> onnx.ModelProto:
    return onnx.load(folder / "target" / file, load_external_data=False)


def nodes(folder: Path, file: str) -> Counter[str]:
    """Count of each "domain.operator"; the domain is empty for ONNX's own operators."""
    return Counter(f"{node.domain}.{node.op_type}" for node in graph(folder, file).graph.node)


def of_type(folder: Path, kind: str, file: str = GRAPH_FILE) -> list[onnx.NodeProto]:
    return [node for node in graph(folder, file).graph.node if node.op_type == kind]


def eager(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [2, T, V] of the original model, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids), use_cache=False).logits.numpy()


def random_ids(rows: int, length: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, (rows, length))


def type_of(value: onnx.ValueInfoProto) -> tuple[list[str | int], int]:
    tensor = value.type.tensor_type
    return [d.dim_param or d.dim_value for d in tensor.shape.dim], tensor.elem_type


def run_export(
    capsys: pytest.CaptureFixture[str], folder: Path, model: Path | str, *more: str
) -> tuple[int, str]:
    """Run `python -m export` in this process, writing below `folder`. Returns status and stderr."""
    places = ["--out", str(folder / "out"), "--cache", str(folder / "cache")]
    capsys.readouterr()
    status = export.__main__.main(["--model", str(model), *places, *more])
    return status, capsys.readouterr().err


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file that no other test uses; create it if it is missing."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


def edit_weights(checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a checkpoint that no other test uses."""
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, {"format": "pt"})


def stored_as(dtype: torch.dtype, source: Path, folder: Path) -> Path:
    """A copy of the checkpoint whose numbers all have this type."""
    checkpoint = Path(shutil.copytree(source, folder))
    edit_weights(checkpoint, lambda w: w.update({k: v.to(dtype) for k, v in w.items()}))
    return checkpoint


def nothing_left(folder: Path) -> bool:
    parts = list((folder / "cache").iterdir()) if (folder / "cache").exists() else []
    return not (folder / "out").exists() and not parts and not leftovers(folder)
