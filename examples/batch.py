"""Many prompts, two at a time, in the order in which they finish: python examples/batch.py
build/demo one.txt two.txt. The prompts are read as slots free, so they may have no end."""

import sys
from collections.abc import Iterator
from pathlib import Path

import outrider


def prompts(files: list[str]) -> Iterator[tuple[str, outrider.Options]]:
    for number, file in enumerate(files):
        yield Path(file).read_text(), outrider.Options(temperature=0.8, seed=number)


folder, *files = sys.argv[1:]
with outrider.load(folder, slots=2) as engine:
    for number, result in engine.batch(prompts(files)):
        print(f"{files[number]}: {result.error or result.text!r}")
    print(f"{engine.stats()['output_tokens']} tokens in all")
