"""Quantising as a step of the export: chosen by what the model itself writes, held against it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from transformers import PreTrainedModel

from runtime.files.errors import OutriderError
from runtime.files.manifest import Dtype, Quality, Weights
from runtime.files.progress import stage

from .. import compare
from ..loading import give_back
from . import quality
from .blocks import Bits, Quantised, Rows
from .whole import quantise_model, requantise

# Texts that the model writes: to choose levels by, and others, of half the length, to measure on.
# Many short ones: a step of all of them reads the weights once.
TEXTS, MEASURED, LENGTH = 16, 8, 128


class Quantising:
    """Of one model. role: as in progress lines. text: token ids to measure the quality on; None has
    the model write them. packed: whether the checkpoint may be quantised already; what lies on
    levels keeps them then."""

    def __init__(
        self, role: str, weights: Weights, source: str, text: Sequence[int] | None, packed: bool
    ):
        self.role, self.weights, self.source = role, weights, source
        self._text, self._packed = text, packed
        self._option = "DRAFT_WEIGHTS" if role == "draft" else "WEIGHTS"
        self._bits: Bits = 4 if weights == "int4" else 8
        self._found: dict[str, Quantised] = {}  # in half precision
        self._said = torch.empty(0)  # likewise

    def quantise(self, model: PreTrainedModel, context: int, folder: Path) -> None:
        """In place, by modules that know of levels. context: the longest text, in tokens. folder:
        for what is put away until it is measured."""
        compare.logits(model, torch.zeros(1, 8, dtype=torch.int64))  # says whether it runs at all
        length = min(LENGTH, context)
        written = None
        if self._bits == 4 or self._text is None:
            with stage(self.role, "write texts") as said:
                written = quality.sample(model, TEXTS + MEASURED, length)
                said.note = f"{written.numel():,} tokens"
        if self._text is not None:
            self.ids = quality.windows(self._text, length // 2, MEASURED)
        else:
            assert written is not None
            self.ids = written[TEXTS:, : length // 2]
        self._full = _put_away(compare.logits(model, self.ids), folder)
        give_back()
        with stage(self.role, f"quantise, {self.weights}") as said:
            texts = None if written is None else written[:TEXTS]
            # Half precision is for TensorRT, which makes a dense copy of blocks of 8 bits.
            rows: Rows | None = None
            if model.dtype != torch.float32:
                rows = "fp8" if self.weights == "fp8" else "int8"
            try:
                found = quantise_model(model, self._bits, texts, keep=self._packed, rows=rows)
            except ValueError as error:
                raise OutriderError(
                    "checkpoint",
                    f"a weight of {self.source} cannot be quantised: {error}",
                    f"Check the weights, or build with {self._option}=full.",
                ) from None
            give_back()
            size = sum(weight.size for weight in found.values())
            said.note = f"{len(found)} matrices, {size / 2**20:,.1f} MiB"
        if model.dtype != torch.float32:  # `again`, and `measure` without an engine, are for these
            self._found, said_here = found, compare.logits(model, self.ids)
            self._said = _put_away(said_here, folder)

    def again(self, model: PreTrainedModel) -> PreTrainedModel:
        """The same levels in another copy of the model."""
        requantise(model, self._found)
        return model

    def measure(self, engine: Path | None, dtype: Dtype) -> Quality:
        """engine: the graph that will run, where it rounds what it multiplies; None takes the
        model's own logits. Refuses nonsense: OutriderError "difference"."""
        with stage(self.role, "quality") as said:
            quantised: Iterable[torch.Tensor] = self._said
            if engine is not None:
                quantised = map(torch.from_numpy, compare.run(engine, dtype, self.ids.numpy()))
            texts = zip(self._full, quantised, self.ids, strict=True)
            found = quality.measure((p[:-1], q[:-1], ids[1:]) for p, q, ids in texts)
            said.note = quality.describe(found)
        quality.refuse_nonsense(found, self.weights, self.source, self._option)
        return found


def _put_away(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """The same in a mapped file without a name, which needs no memory until it is read again."""
    with NamedTemporaryFile(dir=folder) as file:
        size, dtype = tensor.numel(), tensor.dtype
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
    return mapped.view(tensor.shape).copy_(tensor)
