"""Text for benchmarks of drafts: prompts that a bundled pair continues, and text to count drafts
from that shares no document with them (models/corpus.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from runtime.drafts.lookup import Corpus
from runtime.drafts.tables import Tables
from runtime.round import HostRounds
from runtime.text.engine import TextEngine
from runtime.text.tokenizer import Tokenizer

from .ways import fresh
from .workloads import Prompts

FUNCTION = re.compile(r"^( *)def .*\n(?:(?:\1 +.*)?\n)+", re.MULTILINE)
LINES = (
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
WORDS = ("i", "3"), ("a", "2"), ("y", "None"), ("n", "True")
# Greedy, the bundled target goes on with these when they fill the prompt. It has learned no more
# copying than that: a function that stands in the prompt twice it does not repeat.
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
    *(line.format(name=name, value=value) for name, value in WORDS for line in LINES),
)


def held_out(
    tokenizer: Tokenizer, documents: Sequence[str], count: int, length: int
) -> list[list[int]]:
    """`count` prompts of `length` tokens: code of held-out documents, up to some line."""
    made = prompts(tokenizer, documents, seed=0)
    return [made.completion(length) for _ in range(count)]


def functions(
    tokenizer: Tokenizer, documents: Sequence[str], count: int, length: int
) -> list[list[int]]:
    """Held-out functions twice over, and their first line once more: `length` tokens at most, and
    at least half as many."""
    found = []
    for match in (match for text in documents for match in FUNCTION.finditer(text)):
        function = match[0].rstrip() + "\n\n"
        ids = tokenizer.encode(2 * function + function.split("\n", 1)[0] + "\n")
        if length // 2 <= len(ids) <= length:
            found.append(ids)
    order = np.random.default_rng(0).permutation(len(found))
    return [found[order[i % len(found)]] for i in range(count)]


def tables(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Lines of tables, repeated until the prompt is full."""
    chosen = [TABLES[i % len(TABLES)] for i in range(count)]
    return [tokenizer.encode(line * length)[:length] for line in chosen]


def training_part(documents: Sequence[str], characters: int) -> list[str]:
    """Documents from all over the corpus, until they have so many characters."""
    part: list[str] = []
    for i in np.random.default_rng(0).permutation(len(documents)):
        if characters <= 0:
            break
        part.append(documents[i][:characters])
        characters -= len(part[-1])
    return part


def counting(
    engine: TextEngine, documents: Sequence[str], distances: int
) -> tuple[TextEngine, int]:
    """The same models, on the CPU, with tables and a corpus of these documents; and how many tokens
    those have."""
    rounds, tokenizer = engine.decoder.rounds, engine.tokenizer
    assert isinstance(rounds, HostRounds)
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document)  # a separator in front, as in training
    tables = Tables.count(np.array(ids, np.int32), engine.decoder.vocab_size, distances)
    own = HostRounds(rounds.target, rounds.draft, rounds.sampler, tables=tables, corpus=Corpus(ids))
    return fresh(engine, own), len(ids)


def prompts(tokenizer: Tokenizer, documents: Sequence[str], *, seed: int) -> Prompts:
    """Of a bundle's own tokenizer."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Prompts(documents, encode, tokenizer.encode(""), seed=seed)
