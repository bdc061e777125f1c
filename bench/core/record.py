"""Records the rounds of a text: the number of drafts and the time of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.decoder import Decoder
from runtime.sequence import Request
from runtime.stats import Stats

from .clock import lost_seconds


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round. gamma: number of drafts. seconds: time of the whole round. catch_up: time to
    compute rows that were missing in the draft's cache. draft: time of the draft's steps."""

    gamma: int
    seconds: float
    catch_up: float
    draft: float


@dataclass(frozen=True, slots=True)
class Run:
    """One text. lost: share of its time that was lost to other processes."""

    rounds: Sequence[RoundRecord]
    stats: Stats
    lost: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of its rounds. Excludes the prompt's prefill, also the draft's; includes the time in
        which the draft catches up after rounds without drafts."""
        prompt = next((x.catch_up for x in self.rounds if x.catch_up), 0.0)
        return sum(x.seconds for x in self.rounds) - prompt


def record_run(decoder: Decoder, request: Request) -> Run:
    """Decode a text alone, and record its rounds."""
    begin, lost = time.perf_counter(), lost_seconds()
    sequence = decoder.admit(request)
    rounds, stats = [], sequence.stats
    try:
        before = replace(stats)
        while sequence.finish_reason is None:
            decoder.round([sequence])
            if stats.output_tokens == before.output_tokens:  # the draft reads the prompt
                continue
            rounds.append(
                RoundRecord(
                    gamma=stats.drafted - before.drafted,
                    seconds=stats.elapsed - before.elapsed,
                    catch_up=stats.time_draft_prefill - before.time_draft_prefill,
                    draft=stats.time_draft - before.time_draft,
                )
            )
            before = replace(stats)
        if sequence.error is not None:
            raise sequence.error
    finally:
        decoder.release(sequence)
    return Run(rounds, stats, (lost_seconds() - lost) / (time.perf_counter() - begin))
