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
from runtime.files.graphs import Dtype, Quality, Weights
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
TEXTS, MEASURED_TEXTS, LENGTH = 36, 8, 128


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
        self._max_bits = bits
        self._bits_per_weight = self._next_bits_per_weight = float(self._bits)
        self._ranks_matrices = checkpoint.features is None  # whether BITS has an effect
        self._quantised: dict[str, Quantised] = {}  # only in half precision
        self._quantised_logits = torch.empty(0)  # logits, only in half precision

    def quantise(self, model: PreTrainedModel, context: int, folder: Path) -> None:
        """Quantise the model, in place. context: maximum number of tokens of a text. folder: for
        temporary files with the logits to compare. Raises OutriderError "checkpoint",
        "architecture", and "option" if BITS is too small."""
        if self._max_bits is not None and self._max_bits < (needed := minimum_bits(model)) - 0.005:
            raise OutriderError(
                "option",
                f"4-bit weights of {self._checkpoint.source} take {needed:.2f} bits each, scales "
                f"included, more than BITS={self._max_bits:g}",
                f"Build with BITS={math.ceil(10 * needed) / 10:g} or more, or without BITS.",
            )
        encoder = model.config.is_encoder_decoder
        example_sources = [example_source(self._checkpoint.features)] if encoder else []
        # Raises if it fails.
        compare.logits(model, torch.zeros(1, 8, dtype=torch.int64), example_sources)
        try:
            texts = self._generate_texts(model, min(LENGTH, context))
        except OutriderError:
            raise
        except Exception as error:  # noqa: BLE001 - any model code may fail in any way
            reason = f"it does not generate with a KV cache ({first_line(error)})"
            raise self._checkpoint.refused(reason) from None
        self._full_logits = _move_to_file(self._logits(model), folder)
        release_memory()
        with stage(self.role, f"quantise, {self.weights}") as progress:
            # Half precision is for TensorRT, which makes a dense copy of 8-bit blocks.
            rows: Rows | None = None
            # Now, as afterwards an OLMo has no dense parameters.
            half_precision = model.dtype != torch.float32
            if half_precision:
                rows = "fp8" if self.weights == "fp8" else "int8"
            try:
                report = partial(setattr, progress, "phase")
                found = quantise_model(
                    model, self._bits, texts, keep=bool(self._checkpoint.packed), rows=rows,
                    report=report, max_bits=self._max_bits, report_unranked=self._note_unranked,
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
            self._bits_per_weight = bits_per_weight(found.values())
            self._next_bits_per_weight = _bits_with_one_more(found.values())
            progress.note = f"{len(found)} matrices, {size / 2**20:,.1f} MiB"
            progress.note += f", {self._bits_per_weight:.2f} bits per weight"
            if self._max_bits is not None and self._bits_per_weight < self._max_bits - 0.25:
                note(
                    f"only {self._bits_per_weight:.2f} bits per weight of BITS={self._max_bits:g} "
                    "are used: there is no further matrix that may have 8 bits and fits"
                )
            if expert_bytes := sum(weight.nbytes for weight in expert_weights(model)):
                progress.note += f"; experts are not quantised, {expert_bytes / 2**20:,.1f} MiB"
        sources = self._texts.single_sources
        self._sources = (
            [encoder_states(model, source) for source in sources]
            if self._shares_encoder
            else sources
        )
        if half_precision:  # for `requantise`, and for `measure` without an engine
            self._quantised = found
            self._quantised_logits = _move_to_file(self._logits(model), folder)

    def _note_unranked(self, why: str) -> None:
        self._ranks_matrices = False
        note(f"the output matrix gets 8 bits: matrices cannot be ranked by their cost ({why})")

    def _generate_texts(self, model: PreTrainedModel, length: int) -> quality.Texts | None:
        """Generate the texts to quantise by, and return them; keep those to measure on.

        For a model that reads audio there are none to quantise by, as there is no real audio: its
        levels are rounded to nearest.
        """
        half, all_texts = length // 2, None
        with stage(self.role, "prepare texts") as progress:
            report = partial(setattr, progress, "phase")
            if features := self._checkpoint.features:
                self._texts = quality.generate_texts_for(
                    model, quality.random_features(features), half, report
                )
            elif self._bits == 4:
                all_texts = quality.generate_texts(model, TEXTS + MEASURED_TEXTS, length, report)
                self._texts = all_texts[TEXTS:].cut(half)
            elif self._text is None:  # 8 bits are rounded to nearest, without texts
                self._texts = quality.generate_texts(model, MEASURED_TEXTS, half, report)
            if self._text is not None:
                encoder = model.config.is_encoder_decoder
                first = None if encoder else first_token(model)
                windows = quality.windows(self._text, half, MEASURED_TEXTS, first)
                self._texts = quality.Texts(windows)
                if encoder:
                    self._texts = quality.generate_texts_for(model, windows, half, report)
            tokens = self._texts.ids.numel() + (all_texts.ids.numel() if all_texts else 0)
            progress.note = f"{tokens:,} tokens"
        return all_texts and all_texts[:TEXTS]

    def _logits(self, model: PreTrainedModel) -> torch.Tensor:
        return compare.logits(model, self._texts.ids, self._texts.single_sources)

    def requantise(self, model: PreTrainedModel) -> None:
        """Give another copy of the model the same levels."""
        requantise(model, self._quantised)

    def measure(self, engine: Path | None, dtype: Dtype) -> Quality:
        """Measure the quality. engine: the graph that will run, if it rounds activations; None uses
        the model's own logits. Raises OutriderError "difference" for a broken model."""
        with stage(self.role, "quality") as progress:
            quantised: Iterable[torch.Tensor] = self._quantised_logits
            if engine is not None:
                sources = [source.numpy() for source in self._sources]
                graph_logits = compare.run(engine, dtype, self._texts.ids.numpy(), sources)
                quantised = map(torch.from_numpy, graph_logits)
            texts = zip(self._full_logits, quantised, self._texts.ids, strict=True)
            found = quality.measure((p[:-1], q[:-1], ids[1:]) for p, q, ids in texts)
            progress.note = quality.describe(found)
        quality.check_quality(found, self.weights, self._checkpoint.source, self._option)
        advises = self.role == "target" and self._bits == 4 and self._max_bits is None
        if advises and found.kl > quality.BOUND["int8"]:
            next_bits = max(self._bits_per_weight + 0.25, self._next_bits_per_weight)
            suggests_bits = self._ranks_matrices and next_bits < 8
            bits_option = f"BITS={math.ceil(10 * next_bits) / 10:g} or " if suggests_bits else ""
            cost = f"a loss of {found.kl:.2g} nats is large for a target"
            note(f"{cost}: {bits_option}WEIGHTS=int8 loses less, for more bytes")
        return found


def _bits_with_one_more(weights: Collection[Quantised]) -> float:
    """Bits per weight if the smallest 4-bit matrix had 8 bits."""
    sizes = [weight.levels.size for weight in weights if weight.bits == 4]
    numbers = sum(weight.levels.size for weight in weights)
    return bits_per_weight(weights) + 4 * min(sizes, default=0) / numbers


def _move_to_file(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """Copy the tensor to a mapped, deleted file, which takes no memory until it is read again."""
    with NamedTemporaryFile(dir=folder) as file:
        size, dtype = tensor.numel(), tensor.dtype
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
    return mapped.view(tensor.shape).copy_(tensor)
