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
    from .drafts.registry import register_draft as register_draft
    from .files.errors import OutriderError as OutriderError
    from .text.engine import TextEngine as TextEngine
    from .text.options import Options as Options
    from .text.results import Event as Event
    from .text.results import Result as Result
    from .text.speech import Transcription as Transcription
    from .text.stream import Batch as Batch
    from .text.stream import BatchStream as BatchStream
    from .text.stream import Stream as Stream

# With telemetry, ONNX Runtime writes a device id to the home folder and reports to its makers.
environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
__version__ = "0.1.0"
_EXPORTS = {  # the module of each public name
    "Batch": "text.stream",
    "BatchStream": "text.stream",
    "BeamText": "beam.text",
    "BeamTexts": "beam.text",
    "Draft": "drafts.draft",
    "Event": "text.results",
    "GuessedDraft": "drafts.draft",
    "Options": "text.options",
    "OutriderError": "files.errors",
    "Result": "text.results",
    "Segment": "audio.transcription",
    "Stream": "text.stream",
    "TextEngine": "text.engine",
    "Transcription": "text.speech",
    "beam_texts": "beam.text",
    "load": "bundle",
    "register_draft": "drafts.registry",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import public names on first use: a command can be interrupted before all are imported."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
