"""How long the sampling of a round takes, by the kernel and by others, and the bytes that have to
be read for its outcome: the one way in which both suites of the sampling time it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.files.errors import OutriderError

from ...core.clock import Figure, alternate
from .rounds import Round, disagreements, transformers_call

# Verifications, and whole rounds: gamma draws and the verification.
VERIFY, RAW = "verify", "verify, q from logits"
ROUND, COPYING = "round", "round, copying"
NUMPY, NUMPY_ROUND = "NumPy verify", "NumPy round"
TRANSFORMERS, FUNCTION = "Transformers", "Transformers, its function alone"

Way = Callable[[Round], Callable[[], object] | None]


def _from_logits(round_: Round) -> Callable[[], object]:
    """The kernel without the normalisers that its own draft steps hand over."""
    sampler = round_.new_sampler()
    sampler.begin(round_.places)
    sampler.drafts[:] = round_.sampler.drafts
    return lambda: sampler.verify(round_.target, round_.draft)


def _transformers(round_: Round, *, processed: bool) -> Callable[[], object] | None:
    try:
        import torch
    except ImportError:
        return None
    logits = torch.from_numpy(round_.target), torch.from_numpy(round_.draft)
    drafts = torch.from_numpy(round_.sampler.drafts[: round_.batch].copy())
    return transformers_call(*logits, drafts, round_.params, processed=processed)


WAYS: dict[str, Way] = {
    VERIFY: lambda r: r.verify,
    RAW: _from_logits,
    # As the runtime has it: the engine keeps the draft's logits, nothing is copied.
    ROUND: lambda r: lambda: (r.draw(keep=False), r.verify()),
    COPYING: lambda r: lambda: (r.draw(), r.verify()),
    NUMPY: lambda r: r.numpy_verify,
    NUMPY_ROUND: lambda r: lambda: (r.numpy_draw(), r.numpy_verify()),
    TRANSFORMERS: lambda r: _transformers(r, processed=False),
    FUNCTION: lambda r: _transformers(r, processed=True),  # what the paper timed
}


def call(variant: str, way: str) -> str:
    """The name of a variant's way in a `Point`."""
    return f"{variant}: {way}"


@dataclass(frozen=True)
class Point:
    """Rounds of one V, gamma and B, means over the draws.

    accepted: draft tokens of a slot that stand, by variant. By `call`: bytes, what a verification
    has to read; times, of one round.
    """

    vocab_size: int
    gamma: int
    batch: int
    accepted: Mapping[str, float]
    bytes: Mapping[str, float]
    times: Mapping[str, Figure]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Point:
        """From a `json_object`."""
        times = {name: Figure(**figure) for name, figure in found["times"].items()}
        return cls(**{**found, "times": times})

    def json_object(self) -> dict[str, Any]:
        times = {name: figure.json_object() for name, figure in self.times.items()}
        return {**vars(self), "times": times}

    def ms(self, name: str) -> float:
        return self.times[name].ms

    def saved(self, ours: str, theirs: str) -> float:
        """The share of their time that ours does not take."""
        return 1 - self.ms(ours) / self.ms(theirs)

    def bandwidth(self, name: str) -> float:
        """Bytes a second."""
        return 1e3 * self.bytes[name] / self.ms(name)


def measure(
    rounds: Mapping[str, Sequence[Round]],
    ways: Iterable[tuple[str, str]],
    *,
    samples: int,
    patience: float,
) -> Point:
    """Check the rounds against the reference, then time them. Raises OutriderError "numeric".

    rounds: of each variant as many, on the same logits. ways: of a variant; what is not there is
    left out. One sample runs through all of a variant's rounds, so that it meets short and long
    ones. samples, patience: see `alternate`. What is called in turn must not empty the caches for
    the next one, nor fill them for itself: all find the logits in the last level, as after an
    engine's call.
    """
    accepted, read, work, sizes = {}, {}, {}, {}
    for variant, some in rounds.items():
        if wrong := [r.places[b].name for r in some for b in disagreements(r, r.fates())]:
            cause = f"{variant}, V {some[0].vocab_size}: {', '.join(wrong)} not as by NumPy"
            raise OutriderError("numeric", cause, "Do not use this kernel; report it.")
        verdicts = [r.verify() for r in some]
        accepted[variant] = statistics.mean(v.accepted for each in verdicts for v in each)
        of_each = [r.bytes_read(each) for r, each in zip(some, verdicts, strict=True)]
        read[variant] = statistics.mean(of_each)
    one = next(iter(rounds.values()))
    row = one[0].vocab_size * one[0].batch * one[0].draft.itemsize
    for variant, way in ways:
        made = [timed for r in rounds[variant] if (timed := WAYS[way](r)) is not None]
        if made:
            name = call(variant, way)
            work[name] = _all(made)
            # Some normalise the draft's rows themselves, which else is left to the draft steps.
            own = accepted[variant] if way in (RAW, TRANSFORMERS, FUNCTION) else 0
            sizes[name] = read[variant] + row * own

    def touch() -> None:  # the first in turn may run twice in a row, which would favour it
        for round_ in one:
            round_.target.max(), round_.draft.max()

    taken = alternate({"": touch, **work}, rounds=samples, patience=patience)
    times = {name: _share(taken[name], len(one)) for name in work}
    return Point(one[0].vocab_size, one[0].gamma, one[0].batch, accepted, sizes, times)


def _all(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def each() -> None:
        for one in calls:
            one()

    return each


def _share(figure: Figure, of: int) -> Figure:
    return replace(figure, ms=figure.ms / of, low=figure.low / of, high=figure.high / of)
