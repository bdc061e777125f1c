"""A command line of this project in a process of its own: how long it took, its peak of memory.

`python -m bench.core.timed MODULE ARGUMENTS` is that process.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.files.errors import OutriderError

from .clock import Sample, sample
from .machine import resident

CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Timed:
    """seconds, and the share of them lost to other processes; bytes of the peak."""

    seconds: float
    lost: float
    peak: int

    @property
    def sample(self) -> Sample:
        return Sample(self.seconds, self.lost)


def timed(module: str, *arguments: object) -> Timed:
    """Run `python -m module`; what it says goes to stderr. Raises OutriderError "backend"."""
    texts = [str(a.resolve()) if isinstance(a, Path) else str(a) for a in arguments]
    done = subprocess.run(
        [sys.executable, "-m", __name__, module, *texts],
        cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise OutriderError(
            "backend",
            f"python -m {module} ended with status {done.returncode}",
            "See what it has said above.",
        )
    return Timed(**json.loads(done.stdout.splitlines()[-1]))


def _main(module: str, arguments: list[str]) -> int:
    status = 0

    def run() -> None:
        nonlocal status
        status = importlib.import_module(f"{module}.__main__").main(arguments)

    taken = sample(run)
    if not status:
        print(json.dumps(asdict(Timed(taken.seconds, taken.lost, resident()["peak"]))))
    return status


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
