"""Statistics of a request: rounds, acceptance by both definitions, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, TypeVar, cast, get_args

T = TypeVar("T")
Part = Literal["draft", "draft_prefill", "verify", "sample", "host"]


@dataclass(slots=True)
class Stats:
    """Counts and times of one request, or the sums over `requests` of them. Times are seconds here,
    milliseconds in `summary`.

    A round that several sequences share counts in full for each: times are those that this request
    waited, so the times of requests that ran together add up to more than the wall time. ttft and
    elapsed are sums over rounds, from when one is asked for: without the wait for a slot, or for
    the reader of the stream.

    source_tokens: read by an encoder. reused_tokens: tokens of the prompt whose rows the target's
    cache still held.
    drafted: draft tokens passed to a verification. examined: those up to the first rejection, that
    one included. accepted: those that became text.
    drafted_at[i], accepted_at[i]: the same for draft position i of a round.
    """

    requests: int = 1
    source_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    undrafted: int = 0  # rounds without a draft token
    round_tokens: int = 0  # output tokens except the first, which the prefill gives
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
        self, gamma: int, accepted: int, examined: int, emitted: int, *, is_complete: bool = True
    ) -> None:
        """Add a round. emitted: tokens that became text, at most accepted + 1; is_complete:
        the round was not cut off by the end of the text.

        Positions that the end of the text cut off are not counted, because they are not evidence
        about the draft.
        """
        self.rounds += 1
        self.undrafted += gamma == 0
        self.round_tokens += emitted
        self.drafted += gamma
        self.accepted += accepted
        self.examined += examined
        for counts in (self.drafted_at, self.accepted_at):
            counts.extend([0] * (gamma - len(counts)))
        for i in range(gamma if is_complete else min(gamma, emitted)):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < accepted

    def add(self, other: Stats) -> None:
        """Sum the counts and times of another request into this one."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                pairs = zip_longest(mine, theirs, fillvalue=0)
                setattr(self, name, [a + b for a, b in pairs])
            else:
                setattr(self, name, mine + theirs)

    @staticmethod
    def total(every: Iterable[Stats]) -> Stats:
        sum_of_all = Stats(requests=0)
        for stats in every:
            sum_of_all.add(stats)
        return sum_of_all

    @property
    def time_host(self) -> float:
        """Seconds spent in Python between engine calls and sampling."""
        return max(0.0, self.time_rounds - self.time_draft - self.time_verify - self.time_sample)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of `elapsed`."""
        return self.output_tokens / self.elapsed if self.elapsed else 0.0

    @property
    def acceptance_rate(self) -> float:
        """alpha: accepted / examined."""
        return self.accepted / max(1, self.examined)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: tokens per round, including the correction or bonus token."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / drafted at each position of a round, for positions with a count."""
        counts = zip(self.accepted_at, self.drafted_at, strict=True)
        return [accepted / drafted for accepted, drafted in counts if drafted]

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; the mean if requests were summed."""
        return (self.elapsed - self.ttft) / max(1, self.output_tokens - self.requests)

    def summary(self) -> dict[str, Any]:
        """The `stats` object of --json: counts, rates and milliseconds; latencies are means."""

        def ms(seconds: float) -> float:
            return round(seconds * 1e3, 3)

        counts = (
            "source_tokens", "prompt_tokens", "reused_tokens", "output_tokens", "rounds",
            "undrafted", "drafted", "examined", "accepted",
        )  # fmt: skip
        times = ("prefill", "draft_prefill", "draft", "verify", "sample", "host")
        return {
            **{name: getattr(self, name) for name in counts},
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_by_position],
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "ttft_ms": ms(self.ttft / max(1, self.requests)),
            "tpot_ms": ms(self.tpot),
            "tokens_per_second": round(self.tokens_per_second, 3),
            **{f"time_{part}": ms(getattr(self, f"time_{part}")) for part in times},
        }


class Stopwatch:
    """The seconds of a round by part, each second counted once.

    A call made within another part's call counts only as its own part. So drafting can call the
    sampler, and neither needs timing code.
    """

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._part: Part = "host"
        self._since = time.perf_counter()

    def enter(self, part: Part) -> Part:
        """Count time from now on as this part's. Returns the previous part."""
        now, before = time.perf_counter(), self._part
        self._seconds[before] += now - self._since
        self._since, self._part = now, part
        return before

    def lap(self) -> dict[Part, float]:
        """Seconds by part since the last lap."""
        self.enter(self._part)
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def timed_proxy(self, wrapped: T, **parts: Part) -> T:
        """A proxy for `wrapped` whose named methods are counted as the given parts."""
        return cast(T, _TimedProxy(wrapped, self, parts))


class _TimedProxy:
    """See `Stopwatch.timed_proxy`. Methods are looked up at each call, so they may be replaced."""

    def __init__(self, wrapped: Any, watch: Stopwatch, parts: dict[str, Part]):
        self._wrapped = wrapped
        for name, part in parts.items():

            def call(*args: Any, name: str = name, part: Part = part, **options: Any) -> Any:
                before = watch.enter(part)
                try:
                    return getattr(wrapped, name)(*args, **options)
                finally:
                    watch.enter(before)

            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
