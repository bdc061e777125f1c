"""Segments as readable lines and as subtitles: SubRip and WebVTT."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from .transcription import Segment


def format_time(seconds: float, point: str = ".") -> str:
    """Seconds as HH:MM:SS.mmm, or with another character before the milliseconds."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{point}{thousandths:03}"


def lines(segments: Iterable[Segment]) -> Iterator[str]:
    """A line with times for each segment that has text."""
    for times, text in _cues(segments):
        yield f"[{times}] {text}\n"


def subrip(segments: Iterable[Segment], numbers: Iterator[int]) -> Iterator[str]:
    """The cues of an .srt file: one, with the next number, for each segment that has text."""
    for times, text in _cues(segments, ","):
        yield f"{next(numbers)}\n{times}\n{text}\n\n"


WEBVTT_HEADER = "WEBVTT\n\n"  # how a .vtt file begins


def webvtt(segments: Iterable[Segment]) -> Iterator[str]:
    """The cues of a .vtt file, after `WEBVTT_HEADER`. Text that looks like markup is escaped."""
    for times, text in _cues(segments):
        yield f"{times}\n{html.escape(text, quote=False)}\n\n"


def _cues(segments: Iterable[Segment], point: str = ".") -> Iterator[tuple[str, str]]:
    """Times and text, on one line, of each segment that has text."""
    for segment in segments:
        if text := " ".join(segment.text.split()):
            yield f"{format_time(segment.start, point)} --> {format_time(segment.end, point)}", text
