"""A whole text as one launch, beside rounds that are launched ahead: the same tokens, and the time.

For a process of its own: a loop that does not end would take along whoever waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime import TextEngine

from .constructed import give_back, open_pair, prompts

NO_GPU = {"passed": None, "reason": "no GPU"}
TEXTS = 3  # of which the first is the warm-up


class Loop:
    """The loop of the pair in a folder; see `Times`."""

    NAMES = ("loop",)

    def __init__(self, folder: Path, device: str, quick: bool):
        self.folder, self.device, self.tokens = folder, device, 24 if quick else 160

    def loop(self) -> dict[str, Any]:
        if self.device == "cpu":
            return NO_GPU
        options = {"max_new_tokens": self.tokens, "gamma": 4, "ignore_eos": True}
        return compared(lambda **how: open_pair(self.folder, self.device, **how), options)


def compared(
    opened: Callable[..., TextEngine], options: dict[str, Any], prompt: Sequence[int] | None = None
) -> dict[str, Any]:
    """opened: takes `loop`. A driver that refuses the loop is no fault of ours, is told in one
    line, and leaves the time of rounds that are launched ahead."""
    result: dict[str, Any] = {}
    texts: list[list[int]] = []
    for loop, name in ((False, "launched ahead"), (True, "loop")):
        with warnings() as said:
            engine = opened(loop=loop)
            given = prompts(engine, 1)[0] if prompt is None else prompt
            for _ in range(TEXTS):
                text = engine.generate(given, **options)
        if refused := next((line for line in said if "without a CUDA loop" in line), None):
            result["refused"] = refused
            break
        texts.append(text.token_ids)
        stats = text.stats
        device = stats.time_draft + stats.time_verify
        result[name] = {
            "wall_ms": round(1e3 * stats.time_rounds / stats.rounds, 4),
            "device_ms": round(1e3 * device / stats.rounds, 4),
        }
        del engine, text, stats
        give_back()  # before another one takes as much
    same = len(texts) == 2 and texts[0] == texts[1]
    return {"passed": None if "refused" in result else same, **result}


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What the runtime warns of meanwhile."""
    found: list[str] = []
    logger, handler = logging.getLogger("outrider"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
