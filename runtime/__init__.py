"""Outrider: exact speculative decoding on engines compiled ahead of time.

    engine = outrider.load("build/qwen", slots=2)
    result = engine.generate("...", temperature=0.7, stop=["\n\n"], seed=7)
    for event in engine.stream("..."):
        print(event.text, end="")
    engine.stats()

Installed, the package is called `outrider`; in the checkout it is `runtime`.
"""

from .beam.text import BeamText, BeamTexts, beam_texts
from .bundle import load
from .drafts.draft import Draft, GuessedDraft
from .drafts.registry import register as register_draft
from .files.errors import OutriderError
from .text.engine import Event, Options, Result, TextEngine

__version__ = "0.1.0"
__all__ = [
    "BeamText",
    "BeamTexts",
    "Draft",
    "Event",
    "GuessedDraft",
    "Options",
    "OutriderError",
    "Result",
    "TextEngine",
    "beam_texts",
    "load",
    "register_draft",
]
