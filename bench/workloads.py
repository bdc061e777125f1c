"""Prompts of the kinds that Spec-Bench (arXiv 2401.07851) has, from text that may be shipped.

The text is that of the bundled pair's held-out documents: Python's standard library as installed,
of which neither model has seen these files. Prompts are token ids of an exact length; no two are
the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Encode = Callable[[str], list[int]]
KINDS = ("completion", "editing", "question", "continuation")  # methods of `Prompts`
SHORTEST = 400  # characters of a document, or a function, that is of use
ROOM = {"editing": 128, "question": 64}  # tokens that a function twice, or a passage, takes
TRIES = 1000
COPIES = 2  # how often a copied function stands in full before it is begun again


@dataclass(frozen=True)
class Workload:
    """prompts: token ids. new_tokens: of each output."""

    name: str
    prompts: list[list[int]]
    new_tokens: int


class Prompts:
    """Prompts from documents. encode: without special tokens; begin: ids before every prompt."""

    def __init__(self, documents: Sequence[str], encode: Encode, begin: Sequence[int], seed: int):
        self._encode, self._begin = encode, list(begin)
        self._rng = np.random.default_rng(seed)
        usable = [document for document in documents if len(document) >= SHORTEST]
        self._code = [d for d in usable if _is_code(d)]
        self._prose = [d for d in usable if not _is_code(d)]
        if not self._code or not self._prose:
            raise ValueError("the documents need code and prose")

    def completion(self, length: int) -> list[int]:
        """Code up to some line."""
        return self._cut(self._document(self._code), length)

    def continuation(self, length: int) -> list[int]:
        """Prose up to some place."""
        return self._cut(self._document(self._prose), length)

    def editing(self, length: int) -> list[int]:
        """A function several times over, and its first line once more: most of the answer can be
        copied. What is left of the length stands before it. Raises ValueError where none fits."""
        for _ in range(TRIES):
            source = self._document(self._code)
            functions = re.findall(r"^def .*\n(?:(?:[ \t]+.*)?\n)+", source, re.MULTILINE)
            functions = [f.rstrip() + "\n\n" for f in functions if len(f) >= SHORTEST // 4]
            if not functions:
                continue
            function = functions[self._rng.integers(len(functions))]
            head = function.split("\n", 1)[0] + "\n"
            ids = self._encode(function * COPIES + head)
            room = length - len(self._begin) - len(ids)
            if room >= 0:
                before = self._encode(source)
                while len(before) < room:
                    before += self._encode(self._document(self._code))
                return [*self._begin, *before[:room], *ids]
        raise ValueError(f"no function fits {COPIES} times into {length} tokens")

    def question(self, length: int) -> list[int]:
        """A passage, and what asks for it."""
        ending = self._encode("\n\nQuestion: what does this say?\n\nAnswer: this says that ")
        passage = self._cut(self._document(self._prose), length - len(ending))
        return [*passage, *ending]

    def _document(self, documents: Sequence[str]) -> str:
        return documents[int(self._rng.integers(len(documents)))]

    def _cut(self, text: str, length: int) -> list[int]:
        """`length` ids from some line on; documents that are too short follow one another."""
        lines = text.splitlines(keepends=True)
        start = int(self._rng.integers(max(1, len(lines) // 2)))
        ids = self._encode("".join(lines[start:]))
        want = length - len(self._begin)
        while len(ids) < want:
            ids += self._encode(self._document(self._code if _is_code(text) else self._prose))
        return [*self._begin, *ids[:want]]


def _is_code(document: str) -> bool:
    return len(re.findall(r"^\s*(?:def|class|import|from) ", document, re.MULTILINE)) > 3


def workloads(
    prompts: Prompts,
    count: int,
    shapes: Sequence[tuple[int, int]] = ((16, 64), (128, 64)),
    kinds: Sequence[str] = KINDS,
) -> list[Workload]:
    """Each kind with each shape: `count` prompts. shapes: (prompt, output) tokens."""
    made = []
    for name in kinds:
        make = getattr(prompts, name)
        for length, new_tokens in shapes:
            if length < ROOM.get(name, 0):
                continue
            some: list[list[int]] = []
            for _ in range(TRIES):
                if len(some) < count and (prompt := make(length)) not in some:
                    some.append(prompt)
            if len(some) < count:
                raise ValueError(f"there are not {count} different prompts: {name} {length}")
            made.append(Workload(f"{name} {length}+{new_tokens}", some, new_tokens))
    return made
