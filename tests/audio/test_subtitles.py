"""Segments as lines and as subtitles."""

from __future__ import annotations

from itertools import count

import pytest

from runtime.audio.subtitles import WEBVTT_HEADER, format_time, lines, subrip, webvtt
from runtime.audio.transcription import Segment

SEGMENTS = [
    Segment(0.0, 1.5, " Good\n day.", []),
    Segment(1.5, 2.0, " ", []),  # no speech
    Segment(3599.9996, 7325.04, " <b> & co", []),
]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00:00.000"), (59.9996, "00:01:00.000"), (3725.0405, "01:02:05.040")],
)
def test_times(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
    assert format_time(seconds, ",") == text.replace(".", ",")


def test_lines() -> None:
    assert "".join(lines(SEGMENTS)) == (
        "[00:00:00.000 --> 00:00:01.500] Good day.\n[01:00:00.000 --> 02:02:05.040] <b> & co\n"
    )


def test_subrip_counts_what_is_said() -> None:
    assert "".join(subrip(SEGMENTS, count(7))) == (
        "7\n00:00:00,000 --> 00:00:01,500\nGood day.\n\n"
        "8\n01:00:00,000 --> 02:02:05,040\n<b> & co\n\n"
    )


def test_webvtt_has_no_markup() -> None:
    assert WEBVTT_HEADER + "".join(webvtt(SEGMENTS)) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nGood day.\n\n"
        "01:00:00.000 --> 02:02:05.040\n&lt;b&gt; &amp; co\n\n"
    )
