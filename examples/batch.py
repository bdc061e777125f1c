"""Decode many requests in a few slots: each starts when a slot is free, and results arrive as they
finish. Requests are read one by one, so an endless generator works too.

    python examples/batch.py build/demo
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import outrider

PROMPTS = ["import os\n", "def main(", "class Reader:\n", "# Numbers from one to ten\n", "if "]


def main(argv: Sequence[str]) -> None:
    engine = outrider.load(argv[0], slots=2)
    for number, result in engine.batch(PROMPTS, max_new_tokens=24):
        print(f"--- {number}: {PROMPTS[number]!r}, {result.stats.rounds} rounds")
        print(result.error or result.text)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
