"""The promise of bitwise reproducibility: which of gamma, draft, slot, neighbours and thread count
cannot change a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..files.graphs import HOST_FILE, GraphFacts
from ..files.machine import processor
from ..files.manifest import CallBits, Manifest
from ..sampling import kernel

MAX_STEP_WIDTH = 2  # tokens of a plain step's call, at most; wider calls would cost too much


@dataclass(frozen=True)
class Bits:
    """What the bits of the target's logits, and so of a text, do not depend on.

    min_width: number of tokens of the target's narrowest calls. same, other: which of gamma, draft,
    slot, neighbour and thread count make no difference, and which may; both are empty if this was
    not measured.
    """

    min_width: int = 1
    same: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    forgone: bool = False  # given up, because calls are narrower than the promise needs
    slots: bool = True  # whether one slot and several give the same bits
    unknown: str = "not measured on this device"  # the reason, if both are empty

    @property
    def independent_of_gamma(self) -> bool:
        """Whether speculation and plain decoding give the same bits."""
        return "gamma" in self.same

    def line(self) -> str:
        if not self.same and not self.other:
            return f"bits: nothing is promised: {self.unknown}"
        parts = [f"the same for every {_join_names(self.same)}"] if self.same else []
        if self.other:
            why = " (plain steps of one token)" if self.forgone else ""
            parts.append(f"not for every {_join_names(self.other)}{why}")
        if not self.slots:
            parts.append("one slot and several differ")
        return "bits: " + "; ".join(parts)

    def json_object(self) -> dict[str, Any]:
        return {
            "same": self.same, "other": self.other, "narrowest_call": self.min_width,
            "forgone": self.forgone, "slots": self.slots,
        }  # fmt: skip


def runs_measured_graph(facts: GraphFacts) -> bool:
    """Whether the graph that the bundle was made for is the one that runs. Without `liboutrider`
    the portable graph runs instead, to which the measurements do not apply."""
    return HOST_FILE not in facts.files or kernel.available()


def promised_bits(
    manifest: Manifest,
    slots: int,
    default_width: int,
    library: str = "",
    plain_width: int | None = None,
) -> Bits:
    """What a bundle for the CPU promises with this number of slots.

    default_width: the narrowest call if nothing was measured. library: the one that the bundle was
    built with, if another one is installed. plain_width: the narrowest call that was requested.
    """
    facts, unknown = manifest.invariance, ""
    if facts is None:
        unknown = "the build did not measure it; build again without MEASURE=0"
    elif library:
        unknown = f"built with {library}; install that one, or build again"
    elif not runs_measured_graph(manifest.pair.target):
        unknown = "built with liboutrider, which is missing here; run make plugins, or build again"
    elif facts.processor != processor():
        unknown = "built on another processor; build again on this one"
    if facts is None or unknown:
        min_width = plain_width or default_width
        return Bits(min_width, forgone=min_width < default_width, unknown=unknown)
    calls = facts.one if slots == 1 else facts.several
    required_width = _min_agreeing_width(calls)
    min_width = plain_width or required_width or default_width
    widths = required_width is not None and min_width >= required_width and calls.rows
    holds_for = {
        "gamma": widths, "draft": widths, "slot": widths and calls.neighbours,
        "neighbour": widths and calls.neighbours, "thread count": calls.threads,
    }  # fmt: skip
    return Bits(
        min_width,
        tuple(name for name, holds in holds_for.items() if holds),
        tuple(name for name, holds in holds_for.items() if not holds),
        required_width is not None and min_width < required_width,
        facts.slots,
    )


def _min_agreeing_width(calls: CallBits) -> int | None:
    """The width from which on all calls agree; None if some wide ones do not."""
    least = min(calls.widths)
    return least if least <= MAX_STEP_WIDTH and all(w < least for w in calls.others) else None


def _join_names(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
