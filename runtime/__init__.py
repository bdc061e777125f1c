"""Outrider: exact speculative decoding on engines compiled ahead of time.

    import outrider

    with outrider.load("build/qwen", slots=2) as engine:
        result = engine.generate("...", temperature=0.7, stop=["\\n\\n"], seed=7)
        print(result.text, result.finish_reason, result.stats.summary())
        for event in engine.stream("..."):
            print(event.text, end="", flush=True)

`Options` lists what `generate`, `stream` and `batch` take. Failures raise `OutriderError`, with a
kind, a cause and a remedy. In a checkout without its `.venv` the package is called `runtime`.
"""

from importlib import import_module
from os import environ
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" makes them public for type checkers
    from .audio.transcription import Segment as Segment
    from .beam.text import BeamText as BeamText
    from .beam.text import BeamTexts as BeamTexts
    from .beam.text import beam_texts as beam_texts
    from .bundle import load as load
    from .drafts.draft import Draft as Draft
    from .drafts.draft import GuessedDraft as GuessedDraft
    from .drafts.registry import register as register_draft  # noqa: F401
    from .files.errors import OutriderError as OutriderError
    from .text.engine import TextEngine as TextEngine
    from .text.options import Options as Options
    from .text.results import Event as Event
    from .text.results import Result as Result
    from .text.speech import Transcription as Transcription
    from .text.stream import Batch as Batch
    from .text.stream import Stream as Stream

# With telemetry, ONNX Runtime writes a device id to the home folder and reports to its makers.
environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
__version__ = "0.1.0"
_EXPORTS = {
    "Batch": ("text.stream", "Batch"),
    "BeamText": ("beam.text", "BeamText"),
    "BeamTexts": ("beam.text", "BeamTexts"),
    "Draft": ("drafts.draft", "Draft"),
    "Event": ("text.results", "Event"),
    "GuessedDraft": ("drafts.draft", "GuessedDraft"),
    "Options": ("text.options", "Options"),
    "OutriderError": ("files.errors", "OutriderError"),
    "Result": ("text.results", "Result"),
    "Segment": ("audio.transcription", "Segment"),
    "Stream": ("text.stream", "Stream"),
    "TextEngine": ("text.engine", "TextEngine"),
    "Transcription": ("text.speech", "Transcription"),
    "beam_texts": ("beam.text", "beam_texts"),
    "load": ("bundle", "load"),
    "register_draft": ("drafts.registry", "register"),
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import public names on first use: a command can be interrupted before all are imported."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
