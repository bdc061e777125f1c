"""--audio on the command line: output of the windows as they are transcribed, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Cli
from fakes import make_text_engine, random_model

from runtime.audio.transcription import Segment
from runtime.files.errors import OutriderError
from runtime.stats import Stats
from runtime.text.speech import Transcription

WINDOWS = [
    [Segment(0.0, 2.5, " Good day.", [1, 2]), Segment(2.5, 30, " What", [3])],
    [],
    [Segment(61.0, 62, " now?", [4])],
]


@pytest.fixture
def passed() -> dict[str, Any]:
    return {}


@pytest.fixture
def cli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    passed: dict[str, Any],
) -> Cli:  # fmt: skip
    """The command line with an engine that transcribes to the windows above."""
    engine = make_text_engine(tmp_path, random_model(1))
    monkeypatch.chdir(tmp_path)
    for name in ("talk.wav", "a.flac"):
        (tmp_path / name).touch()

    def transcribe(audio: str, *, heard: Callable[..., None], **options: Any) -> Transcription:
        passed.update(options, audio=audio)
        for i, window in enumerate(WINDOWS):
            heard(30.0 * (i + 1), 90.0, window)
        segments = tuple(segment for window in WINDOWS for segment in window)
        text = "".join(segment.text for segment in segments)
        stats = Stats(output_tokens=4, elapsed=2.0)
        return Transcription(text, segments, "en", 90.0, 3, options["seed"], stats)

    monkeypatch.setattr(engine, "transcribe", transcribe)
    return Cli(engine, capsys, monkeypatch)


def test_text(cli: Cli, passed: dict[str, Any]) -> None:
    status, out, err = cli("--audio", "talk.wav")
    assert (status, out) == (0, "Good day. What now?\n")
    head, first, second = err.splitlines()[:3]
    assert head.startswith("audio     talk.wav ") and head.endswith(" s")
    assert first.startswith("audio 90.0 s | windows 3 | language en | ")
    assert second == "output 4 tok | 2.0 tok/s"
    assert passed["audio"] == "talk.wav" and passed["max_new_tokens"] is None
    assert (passed["temperature"], passed["timestamps"], passed["seed"]) == (0.0, False, 0)
    assert not {"language", "source", "chat", "logprobs"} & passed.keys()


@pytest.mark.parametrize(
    ("options", "begin", "end"),
    [
        (["--timestamps"], "[00:00:00.000 --> 00:00:02.500] Good day.\n", "02.000] now?\n"),
        (["--format", "srt"], "1\n00:00:00,000 --> ", "3\n00:01:01,000 --> 00:01:02,000\nnow?\n\n"),
        (["--format", "vtt"], "WEBVTT\n\n00:00:00.000 --> ", "--> 00:01:02.000\nnow?\n\n"),
    ],
)  # fmt: skip
def test_times(cli: Cli, passed: dict[str, Any], options: list[str], begin: str, end: str) -> None:
    """Times of all windows; test_subtitles.py tests the format of a segment."""
    status, out, err = cli("--audio", "talk.wav", *options, "--stats", "none")
    assert (status, err) == (0, "") and passed["timestamps"]
    assert out.startswith(begin) and out.endswith(end) and out.count(" --> ") == 3


def test_what_is_not_exact_is_said(cli: Cli) -> None:
    _, _, err = cli("--audio", "talk.wav", "--lenience", "0.5", "--temperature", "1")
    assert "note: lenience=0.5 is not exact" in err
    assert "note:" not in cli("--audio", "talk.wav", "--temperature", "1")[2]


def test_json(cli: Cli) -> None:
    _, out, _ = cli("--audio", "talk.wav", "--format", "json")
    found = json.loads(out)
    assert found["text"] == " Good day. What now?"
    assert found["segments"][2] == {"start": 61.0, "end": 62, "text": " now?", "token_ids": [4]}
    assert (found["language"], found["duration"], found["windows"]) == ("en", 90.0, 3)
    assert found["stats"]["output_tokens"] == 4


def test_options(cli: Cli, passed: dict[str, Any]) -> None:
    words = (
        "--language de --task translate --condition-on-prev-tokens --temperatures 0,0.2 "
        "--compression-ratio-threshold 1.35 --logprob-threshold=-1 --no-speech-threshold 0.6 "
        "--gamma 2 --top-p 0.9 --max-new-tokens 50 --seed 5 --draft ngram"
    )
    cli("--audio", "a.flac", *words.split())
    expected = {
        "language": "de", "task": "translate", "condition_on_prev_tokens": True,
        "temperature": (0.0, 0.2), "compression_ratio_threshold": 1.35, "logprob_threshold": -1.0,
        "no_speech_threshold": 0.6, "gamma": 2, "top_p": 0.9, "max_new_tokens": 50, "seed": 5,
        "draft": "ngram",
    }  # fmt: skip
    assert expected.items() <= passed.items()
    cli("--audio", "a.flac", "--temperatures", "0,1", "--logprob-threshold=-1")
    assert passed["seed"] != 0, "drawn at random where the text depends on it"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("--prompt hello --audio a.wav", "not allowed with argument"),
        ("--prompt hello --language en", "--language is an option of --audio"),
        ("--prompt hello --timestamps", "--timestamps is an option of --audio"),
        ("--prompt hello --format json", "--format is an option of --audio"),
        ("--audio=", "--audio: the file name is empty"),
        ("--audio -", "--audio cannot read standard input, because a recording is read twice"),
        ("--batch=", "--batch: the file name is empty"),
        ("--audio a.wav --source abc", "--source has no meaning for --audio"),
        ("--audio a.wav --json", "--json has no meaning for --audio"),
        ("--audio a.wav --no-stream", "--stream has no meaning for --audio"),
        ("--audio a.wav --beams 2", "--beams has no meaning for --audio"),
        ("--audio a.wav --stop x", "--stop has no meaning for --audio"),
        ("--audio a.wav --no-chat-template", "--no-chat-template has no meaning for --audio"),
        ("--audio a.wav --chat-template x", "--chat-template has no meaning for --audio"),
        ("--audio a.wav --check", "--check has no meaning for --audio"),
        ("--audio a.wav --corpus a.txt", "--corpus and --table need a draft that reads them"),
        ("--audio a.wav --task sing", "--task: invalid choice"),
        ("--audio a.wav --temperatures 0;1", "is not a list of numbers"),
        ("--audio a.wav --temperature 1 --temperatures 0,1", "set the same option"),
    ],
)
def test_refused(cli: Cli, words: str, cause: str) -> None:
    assert cause in cli.refused(*words.split())


@pytest.mark.parametrize("name", ["none.wav", "two\nlines.wav", "."])
def test_a_file_that_cannot_be_read_is_refused_first(cli: Cli, name: str) -> None:
    """The error is one line, printed before the engines are loaded."""
    assert name.replace("\n", " ") in cli.refused("--audio", name, kind="prompt")


def test_a_target_that_hears_nothing(tmp_path: Path) -> None:
    engine = make_text_engine(tmp_path, random_model(1))
    with pytest.raises(OutriderError, match=r"^option: .*which reads no audio"):
        engine.transcribe(np.zeros(16_000))
