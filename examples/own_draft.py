"""A draft of your own: it completes the phrases that an application says again and again.

    python examples/own_draft.py build/demo

Where the text ends with the beginning of a phrase, the rest of the phrase is proposed. The target
still decides about every token: a phrase that does not fit costs time, and never changes the text.
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
    least = 2  # tokens by which a phrase is recognised

    def guess(self, sequence: Any, drafts: Sequence[int], count: int) -> list[int]:
        text = [*sequence.slot.tokens, *drafts]
        for phrase in self.known:
            for said in range(len(phrase) - 1, self.least - 1, -1):
                if text[-said:] == phrase[:said]:
                    return phrase[said : said + count]
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
    print(f"{result.stats.accepted} of {result.stats.drafted} tokens of phrases were accepted")
    print("the same text as without:", result.token_ids == plain.token_ids)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
