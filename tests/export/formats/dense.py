"""What a packed checkpoint is loaded as, held against what its file means."""

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
    """Names of the tensors that are not `dense` to the bit; all of those must be there."""
    return [name for name, tensor in dense.items() if not torch.equal(tensors[name], tensor)]


def recovers(tensor: torch.Tensor, bits: Any) -> bool:
    """Whether the weight is found again in blocks, and is then the same to the bit."""
    blocks = recover(tensor.numpy(), bits)
    if blocks is None:
        return False
    assert blocks.levels.min() >= RANGE[bits][0] and blocks.levels.max() <= RANGE[bits][1]
    return np.array_equal(blocks.dense(), tensor.numpy())


def bytes_per_number(found: Checkpoint, dense: dict[str, torch.Tensor]) -> set[int]:
    """How many bytes a number of the projections takes until it is quantised. Of all matrices any
    rows are made dense, and none as a whole when the model runs."""
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
