"""Measure the loss from quantising: how far the quantised model's next-token distributions are from
the full model's, on text that the user provides or that the full model itself generates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from runtime.files.errors import OutriderError
from runtime.files.generation import FeatureFacts
from runtime.files.graphs import Quality, Weights

from ..encoder import source_arguments
from ..loading import first_token, logits_width
from .layers import rounding_as_stored

# Nats of mean KL. Rounding costs the bundled pair some 0.0001 with int8, 0.001 with fp8 and 0.001
# to 0.02 with int4, and trained models of 135 and 270 M parameters 0.002 to 0.007 with int8 and 0.1
# to 0.2 with int4. Far beyond these values the model is broken, or cannot be rounded like this.
BOUND: dict[Weights, float] = {"int8": 0.05, "fp8": 0.5, "int4": 1.0}

AUDIO_INPUTS = 4  # audio inputs to measure on: each takes an encoder half a minute
_ROWS = 16  # rows of logits to copy to float64 at a time
Slice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Report = Callable[[str], None]


def silent(message: str) -> None:
    """Ignore progress messages."""


@dataclass(frozen=True)
class Texts:
    """Token sequences. ids: int64 [texts, T]. sources: one for each text, if there is an encoder:
    ids [texts, E] or features [texts, F, T]."""

    ids: torch.Tensor
    sources: torch.Tensor | None = None

    def __getitem__(self, which: slice) -> Texts:
        return Texts(self.ids[which], None if self.sources is None else self.sources[which])

    def cut(self, length: int) -> Texts:
        """The same texts, cut to this many tokens."""
        return Texts(self.ids[:, :length], self.sources)

    @property
    def single_sources(self) -> Sequence[torch.Tensor]:
        """The sources as arguments of `compare.logits`."""
        return () if self.sources is None else torch.split(self.sources, 1)


def generate_texts(model: PreTrainedModel, texts: int, length: int, report: Report) -> Texts:
    """Generate texts by a model that does not read audio. An encoder-decoder generates sources
    first, from random tokens as their sources."""
    if not model.config.is_encoder_decoder:
        return Texts(sample(model, texts, length, report=report))
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(logits_width(model), (texts, length), generator=random)
    sources = sample(model, texts, length, sources=noise, report=report)
    return Texts(sample(model, texts, length, sources=sources, seed=1, report=report), sources)


def generate_texts_for(
    model: PreTrainedModel, sources: torch.Tensor, length: int, report: Report
) -> Texts:
    """Generate a text for each of these sources. Audio is processed one by one, as a large model
    caches hundreds of megabytes for each."""
    together = len(sources) if not sources.is_floating_point() else 1
    parts = [
        sample(model, len(part), length, seed, part, report)
        for seed, part in enumerate(torch.split(sources, together))
    ]
    return Texts(torch.cat(parts), sources)


def random_features(features: FeatureFacts) -> torch.Tensor:
    """Random audio features to measure on, float32 [AUDIO_INPUTS, F, T], scaled like real ones."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(AUDIO_INPUTS, features.feature_size, features.frames, generator=random)


def sample(
    model: PreTrainedModel,
    texts: int,
    length: int,
    seed: int = 0,
    sources: torch.Tensor | None = None,  # one per text, if there is an encoder
    report: Report = silent,  # receives progress messages
) -> torch.Tensor:
    """Sample texts from the model at temperature 1: token ids int64 [texts, length].

    Each begins with the model's first token, or with a random one if it has none, and continues
    after an end-of-text token. All are generated as one batch, so a step reads the weights once.
    """
    random = torch.Generator().manual_seed(seed)
    first, name, inputs = first_token(model), "input_ids", {}
    if sources is not None:
        name = "decoder_input_ids"
        with torch.inference_mode():
            inputs = {"encoder_outputs": model.get_encoder()(**source_arguments(model, sources))}
    ids = torch.empty(texts, length, dtype=torch.int64)
    if first is not None:
        ids[:, 0] = first
    else:
        ids[:, 0] = torch.randint(logits_width(model), (texts,), generator=random)
    cache = None
    with torch.inference_mode(), rounding_as_stored():  # any text of similar probability will do
        for i in range(1, length):
            report(f"token {i + 1} of {length}")
            last = {name: ids[:, i - 1 : i], "past_key_values": cache}
            output = model(**inputs, **last, use_cache=True)
            cache = output.past_key_values
            # Not by `multinomial`, which draws V random numbers per text.
            cumulative = output.logits[:, -1].float().softmax(-1).cumsum(-1)
            drawn = torch.rand(texts, 1, generator=random) * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, drawn, right=True)[:, 0]
            ids[:, i] = tokens.clamp_(max=cumulative.shape[1] - 1)
    return ids


def measure(slices: Iterable[Slice]) -> Quality:
    """Measure the quality over all tokens of the slices.

    A slice is the full model's logits [T, V], the quantised model's [T, V], and the tokens that
    actually follow, int64 [T]. KL is KL(full || quantised). Raises OutriderError "numeric" if a
    logit is NaN or infinite.
    """
    columns: list[torch.Tensor] = []
    pieces = (
        [part[begin : begin + _ROWS] for part in whole]
        for whole in slices
        for begin in range(0, len(whole[0]), _ROWS)
    )
    for full, quantised, following in pieces:
        p, q = full.double().log_softmax(-1), quantised.double().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        same = (full.argmax(-1) == quantised.argmax(-1)).double()
        losses = [-r.gather(-1, following[:, None])[:, 0] for r in (q, p)]
        columns.append(torch.stack([kl, same, *losses]))
    rows = torch.cat(columns, dim=1)
    if not torch.isfinite(rows).all():
        cause = "the quantised model returns NaN or infinity"
        raise OutriderError("numeric", cause, "Build without WEIGHTS.")
    kl, top1, loss, full_loss = rows.mean(1).tolist()
    tokens = rows.shape[1]
    error = rows[0].std(correction=0).item() / math.sqrt(tokens)
    return Quality(tokens, max(0.0, kl), error, top1, math.exp(loss), math.exp(full_loss))


def windows(
    ids: Sequence[int], length: int, max_count: int, first: int | None = None
) -> torch.Tensor:
    """Split a text's tokens into windows, int64 [at most `max_count`, length]. A last partial
    window is dropped, unless it is the only one. first: a token to put in front of each. Raises
    OutriderError "option" for fewer than two tokens."""
    if len(ids) < 2:
        cause = f"the text to measure the quality on has fewer than 2 tokens: {len(ids)}"
        raise OutriderError("option", cause, "Give a longer TEXT, or leave it out.")
    prefix = [] if first is None else [first]
    length = max(1, min(length - len(prefix), len(ids)))
    count = min(max_count, len(ids) // length)
    cut = torch.tensor(ids[: count * length]).view(count, length)
    return torch.cat([torch.tensor([prefix] * count, dtype=torch.int64), cut], dim=1)


def describe(quality: Quality) -> str:
    """One line for progress output."""
    return (
        f"KL {quality.kl:.5f} ± {quality.kl_error:.5f} nats, top-1 {100 * quality.top1:.1f} %"
        f", perplexity {quality.perplexity:.2f} (full {quality.full_perplexity:.2f})"
        f", {quality.tokens:,} tokens"
    )


def check_quality(quality: Quality, weights: Weights, source: str, option: str = "WEIGHTS") -> None:
    """Raise OutriderError "difference" if the KL exceeds `BOUND`. option: the one that set the
    weights."""
    if quality.kl > BOUND[weights]:
        raise OutriderError(
            "difference",
            f"{source} with {option}={weights} is {quality.kl:.3g} nats from the full model, "
            f"more than {BOUND[weights]}",
            f"Build with {option}={'full' if weights == 'int8' else 'int8'}.",
        )
