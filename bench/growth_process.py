"""What bench/growth.py measures in processes of their own, so that the peak of memory is theirs.

`ask` starts one and returns its answer: the JSON object that is its last line.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.bundle import load
from runtime.files.errors import OutriderError
from runtime.text.engine import TextEngine
from runtime.text.options import Options

from .machine import resident
from .timing import sample

CHECKOUT = Path(__file__).parents[1]
WARM_UPS = 3
NEW_TOKENS = 8
POSITION = 200  # of a step, where a slot has so many rows


def ask(task: str, *arguments: object) -> dict[str, Any]:
    """Run one of `TASKS`. Raises OutriderError "backend"; stderr has said why."""
    texts = [str(a.resolve()) if isinstance(a, Path) else str(a) for a in arguments]
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.growth_process", task, *texts],
        cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise OutriderError(
            "backend",
            f"the process for {task} ended with status {done.returncode}",
            "See what it has said above.",
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def row_bytes(engine: TextEngine, role: str) -> float:
    """Of one row of one slot's cache, all layers."""
    facts = dict(engine.manifest.pair.models())[role]
    return facts.cache_bytes(1) / facts.capacity


def step_position(engine: TextEngine) -> int:
    return min(POSITION, engine.decoder.target.capacity - 32)


def _command(module: str, *arguments: str) -> dict[str, Any]:
    """`python -m export` or `engines`, without the interpreter's own start."""
    status = 0

    def run() -> None:
        nonlocal status
        status = importlib.import_module(f"{module}.__main__").main(list(arguments))

    taken = sample(run)
    if status:
        raise SystemExit(status)
    return {"seconds": taken.seconds, "lost": taken.lost, "peak": resident()["peak"]}


def _opened(bundle: str, threads: str, steps: str, slots: str) -> dict[str, Any]:
    """A load with every file's hash, and steps of a token for each slot, after warm-ups."""
    import onnxruntime  # noqa: F401 - its import is no part of a load, its size none of the bundle's

    from .decode import step

    count = int(slots)
    before = resident()["rss"]
    engines: list[TextEngine] = []
    loading = sample(lambda: engines.append(load(bundle, slots=count, threads=int(threads))))
    (engine,), loaded = engines, resident()
    position = step_position(engine)
    call = step(engine.decoder.target, 1, position, 1, count)
    for _ in range(WARM_UPS):
        call()
    taken = [sample(call) for _ in range(int(steps))]
    return {
        "before": before,
        "load": [loading.seconds, loading.lost],
        "load_peak": loaded["peak"],
        "steps": [[s.seconds, s.lost] for s in taken],
        "step_peak": resident()["peak"],
        "read": engine.memory["target"] + count * row_bytes(engine, "target") * (position + 1),
    }


def _texts(bundle: str, threads: str, slots: str, length: str) -> dict[str, Any]:
    """Texts in all slots at once. least: bytes of the weights and of the rows that were written."""
    import onnxruntime  # noqa: F401 - the library's own size belongs to "before"

    before = resident()
    engine = load(bundle, slots=int(slots), threads=int(threads), verify=False)
    options = Options(max_new_tokens=NEW_TOKENS, gamma=0, ignore_eos=True)
    prompts = [[1 + (i + 7 * slot) % 200 for i in range(int(length))] for slot in range(int(slots))]
    for _ in engine.batch((prompt, options) for prompt in prompts):
        pass
    rows = int(slots) * (int(length) + NEW_TOKENS)
    weights = sum(size for part, size in engine.memory.items() if part != "cache")
    least = weights + rows * row_bytes(engine, "target")
    return {**resident(), "before": before["rss"], "least": before["rss"] + least}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "command": _command, "opened": _opened, "texts": _texts,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
