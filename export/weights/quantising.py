"""Quantising as a step of the export: chosen by what the model itself writes, held against it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from runtime.files.errors import OutriderError
from runtime.files.manifest import Dtype, Quality, Weights
from runtime.files.progress import stage

from .. import compare
from . import quality
from .blocks import Bits, Quantised
from .layers import replace
from .whole import quantise_model

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
        self._bits: Bits = 4 if weights == "int4" else 8
        self._found: dict[str, Quantised] = {}

    def quantise(self, model: PreTrainedModel, context: int) -> None:
        """In place, by modules that know of levels. context: the longest text, in tokens."""
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
        self._full = logits(model, self.ids)
        with stage(self.role, f"quantise, {self.weights}") as said:
            texts = None if written is None else written[:TEXTS]
            # Half precision is for TensorRT, which takes no negative scale of 8 bits.
            negative = model.dtype == torch.float32
            try:
                self._found = quantise_model(
                    model, self._bits, texts, keep=self._packed, negative=negative
                )
            except ValueError as error:
                raise OutriderError(
                    "checkpoint",
                    f"a weight of {self.source} cannot be quantised: {error}",
                    "Check the weights, or build without WEIGHTS.",
                ) from None
            size = sum(weight.size for weight in self._found.values())
            said.note = f"{len(self._found)} matrices, {size / 2**20:,.1f} MiB"
        replace(model, self._found)
        self._said = logits(model, self.ids)

    def again(self, model: PreTrainedModel) -> PreTrainedModel:
        """The same levels in another copy of the model."""
        for name, parameter in model.named_parameters():  # an embedding too, which stays dense
            if (weight := self._found.get(name)) is not None:
                dense = torch.from_numpy(weight.dense())
                parameter.data.copy_(dense if dense.shape == parameter.shape else dense.T)
        replace(model, self._found)
        return model

    def measure(self, engine: Path | None, dtype: Dtype) -> Quality:
        """engine: the graph that will run, where it rounds what it multiplies; None takes the
        model's own logits. Refuses nonsense: OutriderError "difference"."""
        with stage(self.role, "quality") as said:
            quantised = self._said
            if engine is not None:
                quantised = torch.from_numpy(compare.run(engine, dtype, self.ids.numpy()))
            pairs = zip(self._full, quantised, self.ids, strict=True)
            found = quality.measure((p[:-1], q[:-1], ids[1:]) for p, q, ids in pairs)
            said.note = quality.describe(found)
        quality.refuse_nonsense(found, self._bits, self.source)
        return found


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """float32 [B, T, V] of whole texts [B, T]."""
    with torch.inference_mode():
        said: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
    return said
