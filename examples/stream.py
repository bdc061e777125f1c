"""Print a text as it is generated, round by round, with accepted draft tokens in brackets.

python examples/stream.py build/demo "import os"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import outrider


def main(argv: Sequence[str]) -> None:
    bundle, prompt = argv[0], argv[1] if len(argv) > 1 else "def read(path):\n"
    engine = outrider.load(bundle)
    with engine.stream(prompt, max_new_tokens=64) as stream:
        for event in stream:
            for text, origin in event.pieces:
                print(f"[{text}]" if origin == "accepted" else text, end="", flush=True)
            if "\n\n" in stream.text:
                break  # leaving the `with` block frees the slot
    print()


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
