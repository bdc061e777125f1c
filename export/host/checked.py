"""Write host.onnx, and compare it with the original model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from runtime.files.errors import OutriderError, first_line
from runtime.files.graphs import HOST_FILE, Cache

from .. import compare
from . import lowering
from .attention import NotLowered


def write_checked(
    folder: Path,
    original: compare.Reference,
    rounded: compare.Reference | None,
    exact: Callable[[], compare.Reference] | None,
    capacity: int,
    cache: Cache | None = None,
) -> str:
    """Write the graph for the CPU, and delete it again if it is not correct; returns a summary. A
    graph with quantised cache rows is accepted only if the one without them is correct, and if the
    rows change a logit by no more than `TOLERANCE`.

    original, exact: as in `compare.compare`. rounded: the original's logits with activations
    rounded as by liboutrider; None if weights are not quantised. Raises OutriderError if the graph
    is not correct and the model cannot run without it.
    """
    check = partial(compare.compare, folder, original, "float32", file=HOST_FILE, rounded=rounded)
    try:
        summary = lowering.write(folder, capacity)
        result = check(exact)
        if not result.passed:
            raise NotLowered(f"it would differ by {result.describe()}")
        if cache:
            lowering.write(folder, capacity, cache)
    except Exception as error:  # noqa: BLE001 - any error is reported
        if cache:
            cause = f"CACHE={cache} needs the graph for the CPU: {first_line(error)}"
            raise OutriderError("backend", cause, "Build without CACHE.") from None
        if rounded is not None:
            raise OutriderError(
                "difference",
                f"the graph for the CPU is not correct: {first_line(error)}",
                "Build without WEIGHTS, and please report the architecture.",
            ) from None
        (folder / HOST_FILE).unlink(missing_ok=True)
        return f"none: {first_line(error)}"
    measure = "8-bit activations change a logit by" if rounded is not None else "largest difference"
    summary += f", {measure} {result.describe()}"
    if cache:
        rows = check(cache=cache)
        if not rows.passed:
            cause = f"{cache} cache rows change a logit by {rows.describe()}"
            raise OutriderError("difference", cause, "Build without CACHE.")
        summary += f", with {cache} cache rows {rows.describe()}"
    return summary
