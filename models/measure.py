"""Measure a draft/target pair: losses, acceptance and agreement; and sample from its models.

Formulas: "Fast Inference from Transformers via Speculative Decoding" (Leviathan, Kalman, Matias).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

ROWS = 1024  # rows of logits per piece: 16 MiB in float32 at V = 4096, which stays near the cache


@dataclass(frozen=True)
class PairFigures:
    """Means over all measured positions; losses in nats per token."""

    positions: int
    target_loss: float
    draft_loss: float
    acceptance_rate: float
    greedy_agreement: float


def hidden_states(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The last layer's output [B, N, hidden] for tokens int64 [B, N], before the output head."""
    return model.model(input_ids=tokens, use_cache=False).last_hidden_state


def logit_pieces(model: PreTrainedModel, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield float32 logits of hidden [R, hidden] in pieces [<= ROWS, V]; all at once is slower."""
    for rows in hidden.split(ROWS):
        yield model.lm_head(rows).float()


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Probability [R] that a token drawn from q [R, V] is accepted under p [R, V].

    Corollary 3.6: alpha = E[sum_x min(p(x), q(x))].
    """
    return torch.minimum(p, q).sum(-1)


@torch.no_grad()
def measure(
    target: PreTrainedModel, draft: PreTrainedModel, tokens: torch.Tensor, prompt: int = 1
) -> PairFigures:
    """Compare the pair on every next-token prediction after the first `prompt` tokens.

    tokens: int64 [B, N]. Both models run in the type of their weights, at temperature 1.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    positions = 0
    for batch in tokens.split(4):
        labels = batch[:, prompt:].flatten()
        pieces = [
            logit_pieces(model, hidden_states(model, batch)[:, prompt - 1 : -1].flatten(0, 1))
            for model in (target, draft)
        ]
        for target_logits, draft_logits, label in zip(*pieces, labels.split(ROWS), strict=True):
            alpha = acceptance(target_logits.softmax(-1), draft_logits.softmax(-1))
            agree = target_logits.argmax(-1) == draft_logits.argmax(-1)
            sums += torch.stack(
                [
                    F.cross_entropy(target_logits, label, reduction="sum").double(),
                    F.cross_entropy(draft_logits, label, reduction="sum").double(),
                    alpha.double().sum(),
                    agree.double().sum(),
                ]
            )
        positions += len(labels)
    return PairFigures(positions, *(sums / positions).tolist())


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    length: int,
    temperatures: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Continue prompts int64 [B, P] to [B, length]; a row with temperature 0 is greedy.

    temperatures: float [B]. Does not stop at separators: a new document follows, as in training.
    """
    tokens = prompts
    step = prompts
    cache = None
    scale = temperatures.clamp(min=1e-6)[:, None]
    while tokens.shape[1] < length:
        out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits = out.logits[:, -1].float()
        drawn = torch.multinomial((logits / scale).softmax(-1), 1, generator=generator)
        step = torch.where(temperatures[:, None] > 0, drawn, logits.argmax(-1, keepdim=True))
        tokens = torch.cat([tokens, step], dim=1)
    return tokens


def report(figures: PairFigures) -> dict[str, float]:
    """The figures as published: rounded, with perplexities (e to the loss)."""
    rounded = {name: round(value, 4) for name, value in asdict(figures).items()}
    rounded["target_perplexity"] = round(math.exp(figures.target_loss), 3)
    rounded["draft_perplexity"] = round(math.exp(figures.draft_loss), 3)
    return rounded
