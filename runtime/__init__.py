"""Outrider: exact speculative decoding on engines compiled ahead of time.

    import outrider

    with outrider.load("build/qwen", slots=2) as engine:
        result = engine.generate("...", temperature=0.7, stop=["\\n\\n"], seed=7)
        print(result.text, result.finish_reason, result.stats.summary())
        for event in engine.stream("..."):
            print(event.text, end="", flush=True)

`Options` lists what `generate`, `stream` and `batch` take. What fails raises `OutriderError`, which
has a kind, a cause and a remedy. From a checkout the package is called `runtime`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .beam.text import BeamText, BeamTexts, beam_texts
    from .bundle import load
    from .drafts.draft import Draft, GuessedDraft
    from .drafts.registry import register as register_draft
    from .files.errors import OutriderError
    from .text.engine import TextEngine
    from .text.options import Options
    from .text.results import Event, Result
    from .text.stream import Batch, Stream

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "BeamText",
    "BeamTexts",
    "Draft",
    "Event",
    "GuessedDraft",
    "Options",
    "OutriderError",
    "Result",
    "Stream",
    "TextEngine",
    "beam_texts",
    "load",
    "register_draft",
]
_MODULES = {
    "beam.text": ("BeamText", "BeamTexts", "beam_texts"),
    "bundle": ("load",),
    "drafts.draft": ("Draft", "GuessedDraft"),
    "files.errors": ("OutriderError",),
    "text.engine": ("TextEngine",),
    "text.options": ("Options",),
    "text.results": ("Event", "Result"),
    "text.stream": ("Batch", "Stream"),
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: a command can be interrupted before all of it is there."""
    if name == "register_draft":
        from .drafts.registry import register

        return register
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
