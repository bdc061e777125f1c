"""What a request measured: rounds, both acceptance definitions, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stats:
    """Counts and times of one request. Times are seconds here, milliseconds in `summary`.

    drafted: draft tokens that a verification saw. examined: those it looked at before the first
    rejection, that one included. accepted: those that became text.
    drafted_at[i], accepted_at[i]: the same for draft position i of a round.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    undrafted: int = 0  # rounds without a draft token
    round_tokens: int = 0  # all but the first, which the prefill gives
    drafted: int = 0
    examined: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    time_prefill: float = 0.0  # target
    time_draft_prefill: float = 0.0
    time_draft: float = 0.0
    time_verify: float = 0.0
    time_sample: float = 0.0
    time_rounds: float = 0.0  # wall time of the rounds, all of the above included
    ttft: float = 0.0
    elapsed: float = 0.0

    def count_round(
        self, gamma: int, accepted: int, examined: int, emitted: int, *, whole: bool = True
    ) -> None:
        """emitted: tokens that became text, at most accepted + 1; whole: nothing was cut off.

        What an end of text cut off says nothing about the draft, so it has no position counted.
        """
        self.rounds += 1
        self.undrafted += gamma == 0
        self.round_tokens += emitted
        self.drafted += gamma
        self.accepted += accepted
        self.examined += examined
        while len(self.drafted_at) < gamma:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(gamma if whole else min(gamma, emitted)):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < accepted

    def add(self, other: Stats) -> None:
        """Sum the counts and times of another request into this one."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                longest = max(len(mine), len(theirs))
                pairs = (x + [0] * (longest - len(x)) for x in (mine, theirs))
                setattr(self, name, [a + b for a, b in zip(*pairs, strict=True)])
            else:
                setattr(self, name, mine + theirs)

    @property
    def time_host(self) -> float:
        """Python between the engine calls and the sampling."""
        return max(0.0, self.time_rounds - self.time_draft - self.time_verify - self.time_sample)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: tokens of a round, the correction or bonus token included."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted of drafted at each position of a round, as far as any round was whole there."""
        counts = zip(self.accepted_at, self.drafted_at, strict=True)
        return [accepted / drafted for accepted, drafted in counts if drafted]

    def tpot(self, requests: int = 1) -> float:
        """Seconds for each output token after the first; the mean where requests were summed."""
        return (self.elapsed - self.ttft) / max(1, self.output_tokens - requests)

    def summary(self, requests: int = 1) -> dict[str, Any]:
        """The `stats` object of --json: counts, rates and milliseconds.

        requests: how many were summed into this one; the latencies are their mean.
        """

        def ms(seconds: float) -> float:
            return round(seconds * 1e3, 3)

        return {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "rounds": self.rounds,
            "undrafted": self.undrafted,
            "drafted": self.drafted,
            "examined": self.examined,
            "accepted": self.accepted,
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_by_position],
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "ttft_ms": ms(self.ttft / max(1, requests)),
            "tpot_ms": ms(self.tpot(requests)),
            "tokens_per_second": round(self.output_tokens / self.elapsed, 3)
            if self.elapsed
            else 0.0,
            "time_prefill": ms(self.time_prefill),
            "time_draft_prefill": ms(self.time_draft_prefill),
            "time_draft": ms(self.time_draft),
            "time_verify": ms(self.time_verify),
            "time_sample": ms(self.time_sample),
            "time_host": ms(self.time_host),
        }
