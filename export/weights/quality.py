"""What quantising costs: how far the quantised model's next-token distributions are from the full
model's, on text that the user gives or that the full model itself wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from runtime.files.errors import OutriderError
from runtime.files.generation import FeatureFacts
from runtime.files.manifest import Quality, Weights

from ..encoder import reading
from ..loading import first_token, width
from .layers import rounding_as_stored

# Nats of mean KL. Rounding costs the bundled pair some 0.0001 with int8, 0.001 with fp8 and 0.001
# to 0.02 with int4, and trained models of 135 and 270 M parameters 0.002 to 0.007 with int8 and 0.1
# to 0.2 with int4. What is far beyond was not rounded but broken, or cannot be rounded like this.
BOUND: dict[Weights, float] = {"int8": 0.05, "fp8": 0.5, "int4": 1.0}

SOUNDS = 4  # that a model which hears is measured on: each is half a minute of an encoder's work
_ROWS = 16  # that float64 copies are made of at a time
Slice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Said = Callable[[str], None]


def silent(said: str) -> None:
    """For who does not want to know."""


@dataclass(frozen=True)
class Texts:
    """ids: int64 [texts, T]. sources: of each, where there is an encoder: ids [texts, E] or
    features [texts, F, T]."""

    ids: torch.Tensor
    sources: torch.Tensor | None = None

    def __getitem__(self, which: slice) -> Texts:
        return Texts(self.ids[which], None if self.sources is None else self.sources[which])

    def cut(self, length: int) -> Texts:
        """The same of fewer tokens."""
        return Texts(self.ids[:, :length], self.sources)

    @property
    def one_by_one(self) -> Sequence[torch.Tensor]:
        """The sources, as `compare.logits` takes them."""
        return () if self.sources is None else torch.split(self.sources, 1)


def write(model: PreTrainedModel, texts: int, length: int, said: Said = silent) -> Texts:
    """Texts of a model that reads text, if anything: what it writes. What an encoder reads, it has
    written too, about random tokens."""
    if not model.config.is_encoder_decoder:
        return Texts(sample(model, texts, length, said=said))
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(width(model), (texts, length), generator=random)
    sources = sample(model, texts, length, sources=noise, said=said)
    return Texts(sample(model, texts, length, sources=sources, seed=1, said=said), sources)


def write_about(
    model: PreTrainedModel, sources: torch.Tensor, length: int, said: Said = silent
) -> Texts:
    """What the model writes about these. One by one, where they are sounds: what a slot keeps of
    one is hundreds of megabytes of a large model."""
    together = len(sources) if not sources.is_floating_point() else 1
    parts = [
        sample(model, len(part), length, seed, part, said)
        for seed, part in enumerate(torch.split(sources, together))
    ]
    return Texts(torch.cat(parts), sources)


def noise(features: FeatureFacts) -> torch.Tensor:
    """Sounds to measure on, float32 [SOUNDS, F, T]: of the scale that features have."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(SOUNDS, features.feature_size, features.frames, generator=random)


def sample(
    model: PreTrainedModel,
    texts: int,
    length: int,
    seed: int = 0,
    sources: torch.Tensor | None = None,  # of each text, where there is an encoder
    said: Said = silent,  # hears how far it is
) -> torch.Tensor:
    """Texts that the model writes at temperature 1: token ids int64 [texts, length].

    Each begins with the model's first token, or with a random one where it has none, and goes on
    behind an end. All are written side by side, so a step reads the weights once.
    """
    random = torch.Generator().manual_seed(seed)
    first, name, inputs = first_token(model), "input_ids", {}
    if sources is not None:
        name = "decoder_input_ids"
        with torch.inference_mode():
            inputs = {"encoder_outputs": model.get_encoder()(**reading(model, sources))}
    ids = torch.empty(texts, length, dtype=torch.int64)
    if first is not None:
        ids[:, 0] = first
    else:
        ids[:, 0] = torch.randint(width(model), (texts,), generator=random)
    cache = None
    with torch.inference_mode(), rounding_as_stored():  # any text about as likely will do
        for i in range(1, length):
            said(f"token {i + 1} of {length}")
            last = {name: ids[:, i - 1 : i], "past_key_values": cache}
            output = model(**inputs, **last, use_cache=True)
            cache = output.past_key_values
            # Not by `multinomial`, which draws V numbers a text.
            below = output.logits[:, -1].float().softmax(-1).cumsum(-1)
            drawn = torch.rand(texts, 1, generator=random) * below[:, -1:]
            found = torch.searchsorted(below, drawn, right=True)[:, 0]
            ids[:, i] = found.clamp_(max=below.shape[1] - 1)
    return ids


def measure(slices: Iterable[Slice]) -> Quality:
    """The quality over all tokens of the slices.

    A slice is full logits [T, V], quantised ones [T, V] and the tokens that really follow, int64
    [T]. KL is KL(full || quantised). Raises OutriderError "numeric" where a logit is NaN or
    infinite.
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
        cause = "the quantised model says NaN or infinity"
        raise OutriderError("numeric", cause, "Build without WEIGHTS.")
    kl, top1, loss, full_loss = rows.mean(1).tolist()
    tokens = rows.shape[1]
    error = rows[0].std(correction=0).item() / math.sqrt(tokens)
    return Quality(tokens, max(0.0, kl), error, top1, math.exp(loss), math.exp(full_loss))


def windows(ids: Sequence[int], length: int, most: int, first: int | None = None) -> torch.Tensor:
    """A text's tokens as int64 [at most `most`, length]: what does not fill a window is left out,
    unless it is all there is. first: a token that each begins with, besides. Raises OutriderError
    "option" for less than two tokens."""
    if len(ids) < 2:
        cause = f"the text to measure the quality on has {len(ids)} token"
        raise OutriderError("option", cause, "Give a longer one with TEXT, or none.")
    begun = [] if first is None else [first]
    length = max(1, min(length - len(begun), len(ids)))
    count = min(most, len(ids) // length)
    cut = torch.tensor(ids[: count * length]).view(count, length)
    return torch.cat([torch.tensor([begun] * count, dtype=torch.int64), cut], dim=1)


def describe(quality: Quality) -> str:
    """One line for the screen."""
    return (
        f"KL {quality.kl:.5f} ± {quality.kl_error:.5f} nats, top-1 {100 * quality.top1:.1f} %"
        f", perplexity {quality.perplexity:.2f} (full {quality.full_perplexity:.2f})"
        f", {quality.tokens:,} tokens"
    )


def refuse_nonsense(
    quality: Quality, weights: Weights, source: str, option: str = "WEIGHTS"
) -> None:
    """Raises OutriderError "difference" beyond `BOUND`. option: which sets the weights."""
    if quality.kl > BOUND[weights]:
        raise OutriderError(
            "difference",
            f"{source} with {option}={weights} is {quality.kl:.3g} nats from the full model, "
            f"more than {BOUND[weights]}",
            f"Build with {option}={'full' if weights == 'int8' else 'int8'}.",
        )
