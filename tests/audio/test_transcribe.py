"""`engine.transcribe` and --audio with exported engines: texts and times of Transformers."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from checkpoints import EOS, tokenizer
from commands import handlers_kept
from originals import one_thread
from speech import LANGUAGES, RATE, TEXT, VOCAB_SIZE, ZERO, check, expected_segments, model, talk
from tokenizers import pre_tokenizers
from transformers import WhisperFeatureExtractor
from workshop import Workshop

from runtime import OutriderError, generate
from runtime.cli import command
from runtime.files.errors import INTERRUPTED

SEED = 1
SOUND = talk(65)


def write(folder: Path, blur: float = 0.0) -> Path:
    """Write the random Whisper as a checkpoint, with one character for each text token."""
    made = copy.deepcopy(model(SEED))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in made.parameters() if blur else ():
            parameter += torch.randn_like(parameter) * parameter.std(correction=0) * blur
    made.save_pretrained(folder)
    special = [f"<|{i}|>" for i in range(TEXT + 1, ZERO)]
    times = [f"<|{i * 0.02:.2f}|>" for i in range(VOCAB_SIZE - ZERO)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:TEXT]
    tokenizer([*letters, EOS, *special, *times]).save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a draft that is sometimes right."""
    folder = tmp_path_factory.mktemp("whisper")
    target, draft = write(folder / "target"), write(folder / "draft", blur=0.05)
    return workshop.bundle(target, draft, max_len=None)


@pytest.mark.parametrize("seconds", [65, pytest.param(180, marks=pytest.mark.slow)])
@pytest.mark.parametrize("context", [False, True])
def test_a_talk(bundle: Path, seconds: int, context: bool) -> None:
    sound = talk(seconds)
    expected = expected_segments(sound, SEED, condition_on_prev_tokens=context)
    for slots, gamma in ((1, 0), (1, 4), (2, 3)):
        engine = one_thread(bundle, slots)
        found = engine.transcribe(sound, gamma=gamma, condition_on_prev_tokens=context)
        check(list(found.segments), expected)
        assert found.language in LANGUAGES and found.duration == seconds and found.windows > 2
        tokens = [token for part in found.segments for token in part.token_ids if token < TEXT]
        assert found.text == engine.tokenizer.decode(tokens) != ""
        assert found.text == "".join(part.text for part in found.segments)
        stats = found.stats
        assert (0 < stats.accepted < stats.drafted) == (gamma > 0)
        assert stats.output_tokens >= len(tokens)


def test_a_checkpoint_with_short_texts(bundle: Path) -> None:
    """Texts shorter than its positions allow. Only one window: Transformers allows more in each
    following one."""
    engine = one_thread(bundle, 1)
    pair = engine.manifest.pair
    assert pair.audio is not None
    pair = replace(pair, audio=replace(pair.audio, max_length=12))
    engine.manifest = replace(engine.manifest, pair=pair)
    sound = SOUND[: 30 * RATE]
    found = engine.transcribe(sound, timestamps=True)
    check(list(found.segments), expected_segments(sound, SEED, max_length=12))
    longer = one_thread(bundle, 1).transcribe(sound, timestamps=True)
    assert found.stats.output_tokens < longer.stats.output_tokens


def test_what_is_heard_while_it_is(bundle: Path) -> None:
    engine, heard = one_thread(bundle, 1), list[tuple[float, float, int]]()
    found = engine.transcribe(SOUND, heard=lambda *now: heard.append((*now[:2], len(now[2]))))
    assert len(heard) == found.windows and sum(new for *_, new in heard) == len(found.segments)
    assert [at for at, *_ in heard] == sorted({at for at, *_ in heard}) and heard[-1][0] == 65


def test_an_encoder_runs_once_a_window(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although language and speech are detected before the text is generated."""
    engine = one_thread(bundle, 2)
    runs, real = [], engine.decoder.target._encode
    monkeypatch.setattr(
        engine.decoder.target, "_encode", lambda *given: runs.append(1) or real(*given)
    )
    found = engine.transcribe(SOUND, logprob_threshold=-1e9, no_speech_threshold=0.9, gamma=0)
    assert len(runs) == found.windows


def test_temperatures(bundle: Path) -> None:
    """A seed repeats a text; a threshold that no text reaches leads to all temperatures."""
    engine = one_thread(bundle, 1)
    options: dict[str, Any] = {"temperature": (0.0, 0.9), "logprob_threshold": 0.0}
    first, again, other = (engine.transcribe(SOUND, seed=s, **options) for s in (5, 5, 6))
    assert first.segments == again.segments != other.segments
    assert first.seed == 5
    options["logprob_threshold"] = -1e9
    assert engine.transcribe(SOUND, **options).segments == engine.transcribe(SOUND).segments


def test_the_checkpoints_language_and_task(bundle: Path) -> None:
    """Fault: ignored, unlike by `generate`."""
    engine = one_thread(bundle, 1)
    detected = engine.transcribe(SOUND)
    [other, *_] = sorted({*LANGUAGES} - {detected.language})
    pair = engine.manifest.pair
    assert pair.audio is not None
    own = replace(pair.audio, language=other, task="translate")
    engine.manifest = replace(engine.manifest, pair=replace(pair, audio=own))
    found = engine.transcribe(SOUND)
    assert (detected.segments != found.segments) and found.language == other
    named = {"language": detected.language, "task": "transcribe"}
    assert engine.transcribe(SOUND, **named).segments == detected.segments
    for empty in ("", 0):
        with pytest.raises(OutriderError, match="task="):
            engine.transcribe(SOUND, task=empty)


def test_windows_do_not_share_random_numbers(bundle: Path) -> None:
    """Two windows with the same sound get different texts."""
    sound = np.tile(talk(30), 2)
    found = one_thread(bundle, 1).transcribe(sound, temperature=1.0, seed=3)
    texts = [part.token_ids for part in found.segments]
    assert len(texts) > 1 and texts[0] != texts[-1]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"stop": "a"}, "stop has no meaning for a transcription"),
        ({"source": "a"}, "source has no meaning for a transcription"),
        ({"temperature": None}, r"temperature=None \(NoneType\) is not a number"),
        ({"temperature": (0.0, -1.0), "logprob_threshold": -1.0}, "temperature=-1.0 is out of"),
        ({"logprob_threshold": math.nan, "temperature": (0, 1)}, "logprob_threshold=nan is out"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is out of range"),
        (
            {"temperature": (1.0, 0.0), "logprob_threshold": -1e9, "draft_temperature": 0.5},
            "draft_temperature has no effect at temperature=0",
        ),
    ],
)
def test_refused(bundle: Path, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(OutriderError, match=f"^option: .*{cause}"):
        one_thread(bundle, 1).transcribe(SOUND[:RATE], **options)


def test_command_line(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "talk.wav")
    soundfile.write(path, SOUND, RATE, subtype="FLOAT")
    assert generate.main(["--engines", str(bundle), "--audio", path, "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert [part["token_ids"] for part in json.loads(out)["segments"]] == [
        part["tokens"].tolist() for part in expected_segments(SOUND, SEED)
    ]
    assert "audio 65.0 s | windows " in err and "rounds " in err


def test_ctrl_c_keeps_what_was_said(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Interrupted in a round of the second window. The engine can be used again afterwards."""
    engine, path = one_thread(bundle, 1), str(tmp_path / "talk.wav")
    soundfile.write(path, SOUND, RATE, subtype="FLOAT")
    whole, real, encode = engine.transcribe(path), engine.round, engine.decoder.target._encode
    windows = list[int]()

    def interrupted(sequences: Any) -> Any:
        if len(windows) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(sequences)

    with handlers_kept(), monkeypatch.context() as patch:
        patch.setattr(command, "load", lambda *_, **__: engine)
        patch.setattr(engine, "round", interrupted)
        patch.setattr(engine.decoder.target, "_encode", lambda *a: windows.append(1) or encode(*a))
        status = generate.main(["--engines", "x", "--audio", path])
    out, err = capsys.readouterr()
    assert status == INTERRUPTED and err.endswith("\ninterrupted\n") and "Traceback" not in err
    assert out.strip() and whole.text.strip().startswith(out.strip())
    assert len(out) < len(whole.text)
    assert engine.decoder.slots.free == 1 and engine.transcribe(path).text == whole.text
