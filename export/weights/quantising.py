"""Quantisation as a step of the export: generate texts, quantise by them, measure the quality."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from transformers import PreTrainedModel

from runtime.files.errors import OutriderError, first_line
from runtime.files.manifest import Dtype, Quality, Weights
from runtime.files.progress import note, stage

from .. import compare
from ..checkpoint import Checkpoint
from ..encoder import encoder_states, example_source
from ..loading import first_token, release_memory
from . import quality
from .blocks import Bits, Quantised, Rows, bits_per_weight
from .costs import NoCosts
from .stored import widen
from .whole import expert_weights, minimum_bits, quantise_model, requantise

# Texts that the model generates: to choose levels by, and others, of half the length, to measure
# on. Many short ones, as a step of all of them reads the weights once.
TEXTS, MEASURED, LENGTH = 36, 8, 128


class Quantising:
    """The quantisation of one model. Matrices of a packed checkpoint keep their levels if they can.

    role: "target" or "draft", as in progress lines. text: token ids to measure the quality on,
    which are sources if there is an encoder; if None, the model generates them. shares_encoder:
    whether its graph reads the states of the target's encoder. bits: maximum bits per weight of
    int4; None: as many as with 8 for the output matrix and 4 for the others.
    """

    def __init__(
        self,
        role: str,
        weights: Weights,
        checkpoint: Checkpoint,
        text: Sequence[int] | None,
        shares_encoder: bool,
        bits: float | None = None,
    ):
        self.role, self.weights, self._checkpoint = role, weights, checkpoint
        self._text, self._shares_encoder = text, shares_encoder
        self._option = "DRAFT_WEIGHTS" if role == "draft" else "WEIGHTS"
        self._bits: Bits = 4 if weights == "int4" else 8
        # Bits per weight: at most; actually; and with 8 bits for one more matrix.
        self._most, self._each, self._next = bits, float(self._bits), float(self._bits)
        self._chooses = checkpoint.features is None  # whether BITS has an effect
        self._found: dict[str, Quantised] = {}  # only in half precision
        self._said = torch.empty(0)  # logits, only in half precision

    def quantise(self, model: PreTrainedModel, context: int, folder: Path) -> None:
        """Quantise the model, in place. context: maximum number of tokens of a text. folder: for
        temporary files with the logits to compare. Raises OutriderError "checkpoint",
        "architecture", and "option" if BITS is too small."""
        if self._most is not None and self._most < (needed := minimum_bits(model)) - 0.005:
            raise OutriderError(
                "option",
                f"4-bit weights of {self._checkpoint.source} take {needed:.2f} bits each, scales "
                f"included, more than BITS={self._most:g}",
                f"Build with BITS={math.ceil(10 * needed) / 10:g} or more, or without BITS.",
            )
        encoder = model.config.is_encoder_decoder
        some = [example_source(self._checkpoint.features)] if encoder else []
        compare.logits(model, torch.zeros(1, 8, dtype=torch.int64), some)  # raises if it fails
        try:
            written = self._write(model, min(LENGTH, context))
        except OutriderError:
            raise
        except Exception as error:  # noqa: BLE001 - any model code may fail in any way
            reason = f"it does not generate with a KV cache ({first_line(error)})"
            raise self._checkpoint.refused(reason) from None
        self._full = _put_away(self._say(model), folder)
        release_memory()
        with stage(self.role, f"quantise, {self.weights}") as said:
            # Half precision is for TensorRT, which makes a dense copy of 8-bit blocks.
            rows: Rows | None = None
            half = model.dtype != torch.float32  # now: afterwards an OLMo has no dense parameters
            if half:
                rows = "fp8" if self.weights == "fp8" else "int8"
            try:
                tell = partial(setattr, said, "phase")
                found = quantise_model(
                    model, self._bits, written, keep=bool(self._checkpoint.packed), rows=rows,
                    report=tell, max_bits=self._most, report_unranked=self._chose_not,
                )  # fmt: skip
            except NoCosts as error:
                raise OutriderError(
                    "architecture",
                    f"the matrices of {self._checkpoint.source} cannot be ranked by cost: {error}",
                    "Build without BITS.",
                ) from None
            except ValueError as error:
                raise OutriderError(
                    "checkpoint",
                    f"a weight of {self._checkpoint.source} cannot be quantised: {error}",
                    f"Check the weights, or build with {self._option}=full.",
                ) from None
            widen(model)
            release_memory()
            size = sum(weight.size for weight in found.values())
            self._each = bits_per_weight(found.values())
            self._next = _with_one_more(found.values())
            said.note = f"{len(found)} matrices, {size / 2**20:,.1f} MiB"
            said.note += f", {self._each:.2f} bits per weight"
            if self._most is not None and self._each < self._most - 0.25:
                note(
                    f"only {self._each:.2f} bits per weight of BITS={self._most:g} are used: there "
                    "is no further matrix that may have 8 bits and fits"
                )
            if left := sum(weight.nbytes for weight in expert_weights(model)):
                said.note += f"; experts are not quantised, {left / 2**20:,.1f} MiB"
        read = self._texts.one_by_one
        self._read = (
            [encoder_states(model, source) for source in read] if self._shares_encoder else read
        )
        if half:  # for `again`, and for `measure` without an engine
            self._found, self._said = found, _put_away(self._say(model), folder)

    def _chose_not(self, why: str) -> None:
        self._chooses = False
        note(f"the output matrix gets 8 bits: matrices cannot be ranked by their cost ({why})")

    def _write(self, model: PreTrainedModel, length: int) -> quality.Texts | None:
        """Generate the texts to quantise by, and return them; keep those to measure on.

        For a model that reads audio there are none to quantise by, as there is no real audio: its
        levels are rounded to nearest.
        """
        half, written = length // 2, None
        with stage(self.role, "prepare texts") as said:
            tell = partial(setattr, said, "phase")
            if features := self._checkpoint.features:
                self._texts = quality.write_about(model, quality.noise(features), half, tell)
            elif self._bits == 4:
                written = quality.write(model, TEXTS + MEASURED, length, tell)
                self._texts = written[TEXTS:].cut(half)
            elif self._text is None:  # 8 bits are rounded to nearest, without texts
                self._texts = quality.write(model, MEASURED, half, tell)
            if self._text is not None:
                encoder = model.config.is_encoder_decoder
                first = None if encoder else first_token(model)
                given = quality.windows(self._text, half, MEASURED, first)
                self._texts = quality.Texts(given)
                if encoder:
                    self._texts = quality.write_about(model, given, half, tell)
            tokens = self._texts.ids.numel() + (written.ids.numel() if written else 0)
            said.note = f"{tokens:,} tokens"
        return written and written[:TEXTS]

    def _say(self, model: PreTrainedModel) -> torch.Tensor:
        return compare.logits(model, self._texts.ids, self._texts.one_by_one)

    def again(self, model: PreTrainedModel) -> None:
        """Give another copy of the model the same levels."""
        requantise(model, self._found)

    def measure(self, engine: Path | None, dtype: Dtype) -> Quality:
        """Measure the quality. engine: the graph that will run, if it rounds activations; None uses
        the model's own logits. Raises OutriderError "difference" for a broken model."""
        with stage(self.role, "quality") as said:
            quantised: Iterable[torch.Tensor] = self._said
            if engine is not None:
                sources = [source.numpy() for source in self._read]
                told = compare.run(engine, dtype, self._texts.ids.numpy(), sources)
                quantised = map(torch.from_numpy, told)
            texts = zip(self._full, quantised, self._texts.ids, strict=True)
            found = quality.measure((p[:-1], q[:-1], ids[1:]) for p, q, ids in texts)
            said.note = quality.describe(found)
        quality.refuse_nonsense(found, self.weights, self._checkpoint.source, self._option)
        plain = self.role == "target" and self._bits == 4 and self._most is None
        if plain and found.kl > quality.BOUND["int8"]:
            more = max(self._each + 0.25, self._next)
            nearer = f"BITS={math.ceil(10 * more) / 10:g} or " if self._chooses and more < 8 else ""
            cost = f"a loss of {found.kl:.2g} nats is large for a target"
            note(f"{cost}: {nearer}WEIGHTS=int8 loses less, for more bytes")
        return found


def _with_one_more(weights: Collection[Quantised]) -> float:
    """Bits per weight if the smallest 4-bit matrix had 8 bits."""
    four = [weight.levels.size for weight in weights if weight.bits == 4]
    numbers = sum(weight.levels.size for weight in weights)
    return bits_per_weight(weights) + 4 * min(four, default=0) / numbers


def _put_away(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """Copy the tensor to a mapped, deleted file, which takes no memory until it is read again."""
    with NamedTemporaryFile(dir=folder) as file:
        size, dtype = tensor.numel(), tensor.dtype
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
    return mapped.view(tensor.shape).copy_(tensor)
