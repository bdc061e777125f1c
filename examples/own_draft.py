"""A custom draft: it completes phrases that an application generates again and again.

    python examples/own_draft.py build/demo

If the text ends with the beginning of a phrase, the draft proposes the rest of the phrase. The
target still verifies every token: a phrase that does not fit costs time, but never changes the
text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import outrider

PHRASES = [
    "if __name__ == '__main__':\n    unittest.main()\n",
    "    def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n",
]


class Phrases(outrider.GuessedDraft):
    help = "the rest of a known phrase"
    known: Sequence[list[int]] = ()  # token ids
    min_match = 2  # tokens that must match to recognise a phrase

    def guess(self, sequence: Any, drafts: Sequence[int], count: int) -> list[int]:
        text = [*sequence.slot.tokens, *drafts]
        for phrase in self.known:
            for matched in range(len(phrase) - 1, self.min_match - 1, -1):
                if text[-matched:] == phrase[:matched]:
                    return phrase[matched : matched + count]
        return []


def main(argv: Sequence[str]) -> None:
    outrider.register_draft("phrases", Phrases)
    engine = outrider.load(argv[0])
    encode = engine.tokenizer.encode
    Phrases.known = [encode(phrase, add_special_tokens=False) for phrase in PHRASES]
    prompt = "import unittest\n\n\nclass Tests(unittest.TestCase):\n    pass\n\n\nif __name__"
    result = engine.generate(prompt, draft="phrases", max_new_tokens=32)
    plain = engine.generate(prompt, gamma=0, max_new_tokens=32)
    print(result.text)
    print(f"{result.stats.accepted} of {result.stats.drafted} drafted tokens were accepted")
    print("same text as without drafts:", result.token_ids == plain.token_ids)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
