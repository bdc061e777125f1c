"""Generate one text, and print its statistics.

    python examples/generate.py build/demo "import os"

The prompt is optional.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import outrider


def main(argv: Sequence[str]) -> None:
    bundle, prompt = argv[0], argv[1] if len(argv) > 1 else "def read(path):\n"
    with outrider.load(bundle) as engine:
        result = engine.generate(prompt, max_new_tokens=64, temperature=0.7, seed=7)
    print(result.text)
    stats = result.stats
    print(f"{result.finish_reason}: {stats.output_tokens} tokens in {stats.rounds} rounds")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
