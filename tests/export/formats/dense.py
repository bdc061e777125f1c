"""Compare the loaded weights of a packed checkpoint with those that its file encodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export.checkpoint import Checkpoint, find
from export.loading import load
from export.weights.blocks import RANGE, recover
from export.weights.layers import Table
from export.weights.stored import load_as_stored

SIZES = {"num_hidden_layers": 1, "intermediate_size": 256}  # Q4_K has blocks of 256


def loaded(path: Path) -> dict[str, torch.Tensor]:
    return load(find(str(path)), torch.float32).state_dict()


def different(tensors: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ bitwise from `dense`, all of which must be present."""
    return [name for name, tensor in dense.items() if not torch.equal(tensors[name], tensor)]


def recovers(tensor: torch.Tensor, bits: Any) -> bool:
    """Whether blocks are recovered from the weight and reproduce it bitwise."""
    blocks = recover(tensor.numpy(), bits)
    if blocks is None:
        return False
    assert blocks.levels.min() >= RANGE[bits][0] and blocks.levels.max() <= RANGE[bits][1]
    return np.array_equal(blocks.dense(), tensor.numpy())


def bytes_per_number(found: Checkpoint, dense: dict[str, torch.Tensor]) -> set[int]:
    """Bytes per weight of the projections before they are quantised. Any rows of a matrix can be
    made dense, and running the model makes no whole matrix dense."""
    assert found.packed
    model = load_as_stored(found)
    parameters, ids, made_whole = dict(model.named_parameters()), torch.arange(9)[None], []
    for name, weight in parameters.items():
        for rows in (slice(5, 21), torch.tensor([[30, 2], [9, 9]])) if weight.dim() == 2 else ():
            assert isinstance(weight, Table)
            assert torch.equal(weight[rows], dense[name][rows]), name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "whole", lambda table: made_whole.append(table))
        logits = model(ids).logits
    assert not made_whole and torch.equal(logits, load(found, torch.float32)(ids).logits)
    tensors = (found.packed.tensors()[name].stored() for name in parameters if "proj" in name)
    levels = [getattr(getattr(tensor, "rows", tensor), "levels", None) for tensor in tensors]
    return {each.itemsize for each in levels if each is not None}
