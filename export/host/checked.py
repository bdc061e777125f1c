"""host.onnx, held against the original model before anybody runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from runtime.files.errors import OutriderError, first_line
from runtime.files.manifest import HOST_FILE, Cache

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
    """Write the graph for the CPU, unless there is none or it is not right; what to say of it. With
    quantised rows only when it is right without, and they cost no more than `TOLERANCE`.

    original, exact: as `compare.compare` has them. rounded: what the original says with activations
    rounded as liboutrider does; None where weights are not quantised. Raises OutriderError.
    """
    check = partial(compare.compare, folder, original, "float32", file=HOST_FILE, rounded=rounded)
    try:
        nodes = lowering.write(folder, capacity)
        result = check(exact)
        if not result.passed:
            raise NotLowered(f"it would differ by {result.told()}")
        if cache:
            lowering.write(folder, capacity, cache)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told or refused
        if cache:
            cause = f"CACHE={cache} needs a graph of our own: {first_line(error)}"
            raise OutriderError("backend", cause, "Build without CACHE.") from None
        if rounded is not None:
            raise OutriderError(
                "difference",
                f"the graph for the CPU is not right: {first_line(error)}",
                "Build without WEIGHTS; and please report the architecture.",
            ) from None
        (folder / HOST_FILE).unlink(missing_ok=True)
        return f"none: {first_line(error)}"
    what = "activations in 8 bits move a logit by" if rounded is not None else "largest difference"
    said = f"{nodes:,} nodes, {what} {result.told()}"
    if cache:
        rows = check(cache=cache)
        if not rows.passed:
            cause = f"rows of {cache} change a logit by {rows.told()}"
            raise OutriderError("difference", cause, "Build without CACHE.")
        said += f", with rows of {cache} {rows.told()}"
    return said
