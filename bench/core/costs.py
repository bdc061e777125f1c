"""Costs of drafting and verification, and the speedup that Theorem 3.8 predicts from them.

The costs of a draft step, and of a verification depending on its width, are measured in one of two
ways: from calls of the engines alone (`costs_from_calls`), or from the rounds of recorded texts
(`costs_from_rounds`), which include sampling and host. Both give `RoundCosts`, in units of plain
steps, and `predicted_speedup` applies the theorem to them. The formulas are in
`runtime.theory.formulas`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.gamma.costs import RoundCosts
from runtime.theory.formulas import expected_tokens

from .clock import Sample, median_time
from .record import Run

MIN_ROUNDS = 8  # rounds of a width that are needed for their median to count


def describe_plain_steps(width: int) -> str:
    """A note for the heading of tables. width: number of tokens in the target's narrowest calls."""
    return f"Outrider's plain steps are calls of {width} token{'s' * (width > 1)}"


def costs_from_calls(samples: Mapping[str, Sequence[Sample]]) -> RoundCosts:
    """Costs from calls of the engines alone: "draft", and the target with "1", "2", ... tokens."""
    seconds = {name: median_time(some).ms / 1e3 for name, some in samples.items()}
    draft = seconds.pop("draft")
    return RoundCosts.of(draft, {int(n) - 1: x for n, x in seconds.items()}, len(seconds) - 1)


def costs_from_rounds(plain: Sequence[Run], texts: Sequence[Run], max_gamma: int) -> RoundCosts:
    """Costs from recorded texts: `plain` without drafts, `texts` with up to `max_gamma` per round.

    The cost of a draft step is the median over texts of its mean, that of a verification the median
    over rounds. Widths with too few rounds are ignored.
    """
    rests: dict[int, list[float]] = defaultdict(list)
    for text in texts:
        for x in text.rounds:
            rests[x.gamma].append(x.seconds - x.catch_up - x.draft)
    seen = {
        gamma: statistics.median(times)
        for gamma, times in rests.items()
        if len(times) >= MIN_ROUNDS
    }
    seen[0] = statistics.median(x.seconds for text in plain for x in text.rounds)
    drafts = [text.stats.time_draft / text.stats.drafted for text in texts if text.stats.drafted]
    return RoundCosts.of(statistics.median(drafts) if drafts else 0.0, seen, max_gamma)


def verify_cost(costs: RoundCosts, drafts: float) -> float:
    """Cost of a round without its draft steps, in plain steps; interpolated linearly between whole
    numbers of drafts."""
    return float(np.interp(drafts, range(len(costs.verify)), costs.verify))


def predicted_speedup(alpha: float, gammas: Iterable[float], costs: RoundCosts) -> float:
    """The speedup of Theorem 3.8 with measured costs.

    gammas: number of drafts in each round, or just their mean. They vary, because a lookup may find
    fewer tokens than requested, and the end of a text has no room for more.
    """
    every = list(gammas)
    spent = sum(g * costs.draft + verify_cost(costs, g) for g in every)
    return sum(expected_tokens(alpha, g) for g in every) / spent


# Bytes


def row_bytes(checkpoint: Path, element: int) -> int:
    """Bytes of one row of keys and values in all layers: of one token, or, in an encoder-decoder,
    of one source position in all layers of the decoder. element: bytes per number."""
    from transformers import AutoConfig  # imported here: it takes seconds, and few suites need it

    config = AutoConfig.from_pretrained(checkpoint).get_text_config(decoder=True)

    def first(*names: str) -> Any:
        return next((found for name in names if (found := getattr(config, name, None))), None)

    # A decoder's own configuration has its layers and heads under the names of decoder-only models,
    # but T5's also has the encoder's layers there.
    layers = first("num_decoder_layers", "num_hidden_layers")
    heads = first("num_key_value_heads", "num_attention_heads")
    width = first("head_dim") or config.hidden_size // config.num_attention_heads
    return int(2 * layers * heads * width * element)


@dataclass(frozen=True)
class Traffic:
    """Bytes that decoding must read.

    weights, row: the target's weights, and one row of the caches of all its layers. draft_weights,
    draft_row: the same for the draft. rows: mean number of rows in the cache.
    """

    weights: float
    row: float
    rows: float
    draft_weights: float = 0.0
    draft_row: float = 0.0

    def round_bytes(self, drafted: float = 0.0) -> float:
        """Bytes that a round with this many draft steps must read."""
        target = self.weights + self.rows * self.row
        return target + drafted * (self.draft_weights + self.rows * self.draft_row)
