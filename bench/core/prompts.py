"""The prompts of all benchmarks.

`PROMPTS` are four beginnings of code for the bundled pair. `Prompts` makes prompts of an exact
number of tokens, of kinds like those of Spec-Bench (arXiv 2401.07851), from text that may be
redistributed: the bundled pair's held-out documents, files of Python's standard library that
neither model has seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import numpy as np

from runtime.text.tokenizer import Tokenizer

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n",
    "for key, value in items.items():\n",
)
KINDS = ("completion", "editing", "question", "continuation")  # methods of `Prompts`
MIN_CHARACTERS = 400  # characters that a document must have
MAX_TRIES = 1000
COPIES = 2  # full copies of a function before its first line is repeated

# If one of these lines fills the prompt, the bundled target continues it greedily. It cannot copy
# more than that: it does not repeat a function that occurs twice in the prompt.
_LINES = (
    "{value}, {value}, {value}, {value}, ",
    "        self.assertEqual({name}, {value})\n",
    "    self.{name} = {value}\n",
    "    [{value}, {value}, {value}],\n",
    "    print({name})\n",
    "    ('{name}', {value}),\n",
    "    {name} = {value}\n",
    "    '{name}': {value},\n",
    "        self.assertTrue({name})\n",
    "    {name}.append({value})\n",
)
_WORDS = ("i", "3"), ("a", "2"), ("y", "None"), ("n", "True")
TABLES = (
    "0, 0, 0, 0, ",
    "        self.assertEqual(x, 1)\n",
    "* * * * ",
    "    self.x = 1\n",
    "    [0, 0, 0],\n",
    "    print(x)\n",
    "    ('a', 'b'),\n",
    "    x = 1\n",
    "- - - - ",
    "    'a': 'b',\n",
    "    0.0, 0.0, 0.0,\n",
    "        self.assertTrue(x)\n",
    *(line.format(name=name, value=value) for name, value in _WORDS for line in _LINES),
)


class Prompts:
    """Makes prompts from documents with a model's own tokenizer. Raises ValueError if the documents
    contain no code or no prose."""

    def __init__(self, tokenizer: Tokenizer, documents: Sequence[str], seed: int = 0):
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._begin = tokenizer.encode("")  # special tokens at the beginning of every prompt
        self._rng = np.random.default_rng(seed)
        usable = [document for document in documents if len(document) >= MIN_CHARACTERS]
        self._code = [d for d in usable if _is_code(d)]
        self._prose = [d for d in usable if not _is_code(d)]
        if not self._code or not self._prose:
            raise ValueError("the documents need code and prose")
        self._tables = 0

    def many(self, kind: str, count: int, length: int) -> list[list[int]]:
        """`count` different prompts of a kind. Raises ValueError if there are not enough."""
        make, some = getattr(self, kind), list[list[int]]()
        for _ in range(MAX_TRIES):
            if len(some) < count and (prompt := make(length)) not in some:
                some.append(prompt)
        if len(some) < count:
            raise ValueError(f"there are not {count} different prompts: {kind} {length}")
        return some

    def completion(self, length: int) -> list[int]:
        """A piece of code to continue."""
        return self._cut(self._document(self._code), length)

    def continuation(self, length: int) -> list[int]:
        """A piece of prose to continue."""
        return self._cut(self._document(self._prose), length)

    def editing(self, length: int) -> list[int]:
        """A function several times in a row, followed by its first line.

        Most of the answer can be copied. Other code fills the rest of the length before it. Raises
        ValueError if no function fits.
        """
        for _ in range(MAX_TRIES):
            source = self._document(self._code)
            functions = re.findall(r"^def .*\n(?:(?:[ \t]+.*)?\n)+", source, re.MULTILINE)
            functions = [f.rstrip() + "\n\n" for f in functions if len(f) >= MIN_CHARACTERS // 4]
            function = self._document(functions) if functions else ""
            ids = self._encode(function * COPIES + function.split("\n", 1)[0] + "\n")
            room = length - len(self._begin) - len(ids)
            if functions and room >= 0:
                before = self._filled(self._encode(source), self._code, room)
                return [*self._begin, *before, *ids]
        raise ValueError(f"no function fits {COPIES} times into {length} tokens")

    def question(self, length: int) -> list[int]:
        """A passage, followed by a question about it."""
        ending = self._encode("\n\nQuestion: what does this say?\n\nAnswer: this says that ")
        passage = self._cut(self._document(self._prose), length - len(ending))
        return [*passage, *ending]

    def table(self, length: int) -> list[int]:
        """One line of `TABLES` repeated until the prompt is full; each call takes the next line."""
        line = TABLES[self._tables % len(TABLES)]
        self._tables += 1
        return [*self._begin, *self._encode(line * length)][:length]

    def _document(self, documents: Sequence[str]) -> str:
        return documents[int(self._rng.integers(len(documents)))]

    def _cut(self, text: str, length: int) -> list[int]:
        """`length` ids, starting at a random line of the text."""
        lines = text.splitlines(keepends=True)
        start = int(self._rng.integers(max(1, len(lines) // 2)))
        others = self._code if _is_code(text) else self._prose
        ids = self._encode("".join(lines[start:]))
        return [*self._begin, *self._filled(ids, others, length - len(self._begin))]

    def _filled(self, ids: list[int], documents: Sequence[str], length: int) -> list[int]:
        """`length` ids: `ids`, continued with further documents if necessary."""
        while len(ids) < length:
            ids += self._encode(self._document(documents))
        return ids[:length]


def _is_code(document: str) -> bool:
    return len(re.findall(r"^\s*(?:def|class|import|from) ", document, re.MULTILINE)) > 3
