"""Generate JSON that follows a schema, drafted and verified like any other text.

    pip install -c constraints.txt llguidance
    python examples/json_schema.py build/demo

A grammar determines which tokens may come next. A logits processor forbids all others, for target
and draft, so the output has the target's distribution restricted to the tokens that the schema
allows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt
import outrider

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "gone"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Grammar:
    """The logits processor of one request. It is also called for texts that end in draft tokens,
    which may be rejected later, so it goes back to the point where a text differs from the last."""

    def __init__(self, tokens: llguidance.LLTokenizer, grammar: str):
        self._matcher = llguidance.LLMatcher(tokens, grammar)
        self._read: list[int] = []

    def __call__(self, scores: npt.NDArray[np.float32], text: Sequence[int], begin: int) -> None:
        output = list(text[begin:])
        same = 0
        while same < min(len(self._read), len(output)) and self._read[same] == output[same]:
            same += 1
        self._matcher.rollback(len(self._read) - same)
        # Stop at a forbidden draft token: the masks for later positions are not used.
        same += self._matcher.try_consume_tokens(output[same:])
        self._read = output[:same]
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        scores[np.unpackbits(allowed, count=len(scores), bitorder="little") == 0] = -np.inf


def tokens_of(engine: outrider.TextEngine, bundle: Path) -> llguidance.LLTokenizer:
    ends = list(engine.manifest.pair.tokenizer.eos_token_ids)
    return llguidance.LLTokenizer(str(bundle / "tokenizer" / "tokenizer.json"), eos_token=ends)


def main(argv: Sequence[str]) -> None:
    engine = outrider.load(argv[0])
    tokens = tokens_of(engine, Path(argv[0]))
    compact = {"whitespace_flexible": False}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, defaults=compact)
    prompt = "A person in JSON: "
    options = {"temperature": 0.7, "seed": 1, "verify": "coupled", "max_new_tokens": 200}
    result = engine.generate(prompt, processors=[Grammar(tokens, grammar)], **options)
    plain = engine.generate(prompt, processors=[Grammar(tokens, grammar)], gamma=0, **options)
    print(result.text)
    print(f"{result.stats.accepted} of {result.stats.drafted} drafted tokens were accepted")
    print("same text as without drafts:", result.token_ids == plain.token_ids)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
