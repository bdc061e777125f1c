"""The texts that everything is measured on.

`PROMPTS` are four beginnings of code for the bundled pair. `Prompts` makes token ids of an exact
length in kinds like those of Spec-Bench (arXiv 2401.07851), from text that may be shipped: the
bundled pair's held-out documents, files of Python's standard library that neither model has seen.
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
SHORTEST = 400  # characters of a document that is of use
TRIES = 1000
COPIES = 2  # how often a copied function stands in full before it is begun again

# Greedy, the bundled target goes on with these when they fill the prompt. It has learned no more
# copying than that: a function that stands in the prompt twice it does not repeat.
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
    """Makes prompts from documents, with a model's own tokenizer; raises ValueError where the
    documents have no code or no prose."""

    def __init__(self, tokenizer: Tokenizer, documents: Sequence[str], seed: int = 0):
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self._begin = tokenizer.encode("")  # what is before every prompt
        self._rng = np.random.default_rng(seed)
        usable = [document for document in documents if len(document) >= SHORTEST]
        self._code = [d for d in usable if _is_code(d)]
        self._prose = [d for d in usable if not _is_code(d)]
        if not self._code or not self._prose:
            raise ValueError("the documents need code and prose")
        self._tables = 0

    def many(self, kind: str, count: int, length: int) -> list[list[int]]:
        """`count` different prompts of a kind. Raises ValueError where there are not so many."""
        make, some = getattr(self, kind), list[list[int]]()
        for _ in range(TRIES):
            if len(some) < count and (prompt := make(length)) not in some:
                some.append(prompt)
        if len(some) < count:
            raise ValueError(f"there are not {count} different prompts: {kind} {length}")
        return some

    def completion(self, length: int) -> list[int]:
        """Code up to some line."""
        return self._cut(self._document(self._code), length)

    def continuation(self, length: int) -> list[int]:
        """Prose up to some place."""
        return self._cut(self._document(self._prose), length)

    def editing(self, length: int) -> list[int]:
        """A function several times over, and its first line once more.

        Most of the answer can be copied. What is left of the length stands before it. Raises
        ValueError where none fits.
        """
        for _ in range(TRIES):
            source = self._document(self._code)
            functions = re.findall(r"^def .*\n(?:(?:[ \t]+.*)?\n)+", source, re.MULTILINE)
            functions = [f.rstrip() + "\n\n" for f in functions if len(f) >= SHORTEST // 4]
            function = self._document(functions) if functions else ""
            ids = self._encode(function * COPIES + function.split("\n", 1)[0] + "\n")
            room = length - len(self._begin) - len(ids)
            if functions and room >= 0:
                before = self._filled(self._encode(source), self._code, room)
                return [*self._begin, *before, *ids]
        raise ValueError(f"no function fits {COPIES} times into {length} tokens")

    def question(self, length: int) -> list[int]:
        """A passage, and what asks for it."""
        ending = self._encode("\n\nQuestion: what does this say?\n\nAnswer: this says that ")
        passage = self._cut(self._document(self._prose), length - len(ending))
        return [*passage, *ending]

    def table(self, length: int) -> list[int]:
        """A line of a table, the next one each time, until the prompt is full."""
        line = TABLES[self._tables % len(TABLES)]
        self._tables += 1
        return [*self._begin, *self._encode(line * length)][:length]

    def _document(self, documents: Sequence[str]) -> str:
        return documents[int(self._rng.integers(len(documents)))]

    def _cut(self, text: str, length: int) -> list[int]:
        """`length` ids from some line on."""
        lines = text.splitlines(keepends=True)
        start = int(self._rng.integers(max(1, len(lines) // 2)))
        others = self._code if _is_code(text) else self._prose
        ids = self._encode("".join(lines[start:]))
        return [*self._begin, *self._filled(ids, others, length - len(self._begin))]

    def _filled(self, ids: list[int], documents: Sequence[str], length: int) -> list[int]:
        """So many ids, with those of further documents behind them."""
        while len(ids) < length:
            ids += self._encode(self._document(documents))
        return ids[:length]


def _is_code(document: str) -> bool:
    return len(re.findall(r"^\s*(?:def|class|import|from) ", document, re.MULTILINE)) > 3
