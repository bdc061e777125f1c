"""Files and arrays of all kinds become one stream of samples, or are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from runtime.audio.mel import LogMel
from runtime.audio.recording import Recording
from runtime.audio.windows import Windows
from runtime.files.errors import OutriderError

RATE = 16_000
LOG_MEL = LogMel(80, RATE, 400, 160)


def sine(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def samples(audio: object, size: int = 4096) -> np.ndarray:
    blocks = list(Recording(audio, RATE).blocks(size))
    assert all(len(block) == size for block in blocks[:-1])
    return np.concatenate(blocks)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg"])
def test_files_at_the_rate_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    sound = sine(1.5, RATE)
    soundfile.write(tmp_path / name, sound, RATE)
    found = samples(tmp_path / name)
    assert found.dtype == np.float32
    expected, _ = soundfile.read(tmp_path / name, dtype="float32")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(samples(str(tmp_path / name), size=7), expected)


def test_channels_bits_and_rates(tmp_path: Path) -> None:
    """Stereo in 8 bits at 11 kHz with one silent channel becomes a sine of 440 Hz."""
    stereo = np.stack([sine(2, 11_025), np.zeros(2 * 11_025)], axis=1)
    soundfile.write(tmp_path / "a.wav", stereo, 11_025, subtype="PCM_U8")
    found = samples(tmp_path / "a.wav")
    assert len(found) == 2 * RATE
    inner = slice(RATE // 4, -RATE // 4)  # the filter rings at an abrupt start
    np.testing.assert_allclose(found[inner], sine(2, RATE)[inner] / 2, atol=0.01)
    read, rate = soundfile.read(tmp_path / "a.wav", dtype="float32")
    whole = soxr.resample(read.mean(axis=1), rate, RATE)
    np.testing.assert_allclose(found, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("audio", "cause"),
    [
        (np.zeros((2, 100)), "float64 [2, 100], not float samples"),
        (np.zeros(100, np.int16), "int16 [100], not float samples"),
        ([0.0, 0.1], "of type list"),
        ("nowhere.wav", "cannot read nowhere.wav: No such file"),
        ("a\0b", "cannot read a"),
        (".", ". is a folder"),
        ("/dev/zero", "/dev/zero is not a regular file"),
    ],
)
def test_what_is_no_audio_is_refused_at_once(audio: object, cause: str) -> None:
    with pytest.raises(OutriderError) as refused:
        Recording(audio, RATE)
    assert refused.value.kind == "prompt" and cause in refused.value.cause


def test_files_that_hold_no_audio(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("this is no sound\n" * 100)
    (tmp_path / "empty.wav").write_bytes(b"")
    soundfile.write(tmp_path / "a.flac", np.random.default_rng(0).normal(0, 0.1, 50_000), RATE)
    whole = (tmp_path / "a.flac").read_bytes()
    (tmp_path / "damaged.flac").write_bytes(whole[: len(whole) // 2])
    for name in ("text.wav", "empty.wav", "damaged.flac"):
        with pytest.raises(OutriderError, match=rf"^prompt: .*{name} cannot be read as audio: "):
            samples(tmp_path / name)


@pytest.mark.parametrize("name", ["a.wav", "a.aiff", "a.w64", "a.rf64"])
def test_a_file_that_is_cut_off(tmp_path: Path, name: str) -> None:
    """libsndfile reads the available samples without an error."""
    soundfile.write(tmp_path / name, sine(1, RATE), RATE)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OutriderError, match=rf"^prompt: .*{name} is truncated: it has"):
        samples(tmp_path / name)


def test_a_file_that_was_written_into_a_pipe(tmp_path: Path) -> None:
    """Its header has no length."""
    soundfile.write(tmp_path / "a.wav", sine(1, RATE), RATE)
    whole = bytearray((tmp_path / "a.wav").read_bytes())
    size = whole.index(b"data") + 4
    whole[size : size + 4] = b"\xff" * 4
    (tmp_path / "a.wav").write_bytes(whole)
    assert len(samples(tmp_path / "a.wav")) == RATE


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_a_sample_that_is_no_number_is_named(tmp_path: Path, odd: float, rate: int) -> None:
    sound = sine(1, rate)
    sound[rate // 2] = odd
    soundfile.write(tmp_path / "a.wav", sound, rate, subtype="FLOAT")
    for audio in (tmp_path / "a.wav", sound) if rate == RATE else (tmp_path / "a.wav",):
        with pytest.raises(OutriderError, match=r"is not a finite number, after 0\.500 s"):
            samples(audio)


@pytest.mark.parametrize("library", ["soundfile", "soxr"])
def test_what_is_missing_is_named(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile.write(tmp_path / "a.wav", sine(0.1, 8000), 8000)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(OutriderError, match=f"^backend: .*{library} is not installed.*pip install"):
        samples(tmp_path / "a.wav")
    assert samples(sine(0.1, RATE)).dtype == np.float32, "an array needs neither"


# Windows


def windows(sound: np.ndarray) -> Windows:
    return Windows(Recording(sound, RATE), LOG_MEL, 30 * RATE)


def whole_features(sound: np.ndarray) -> np.ndarray:
    """Features computed in one call, followed by as many silent frames as a window may need."""
    found = windows(sound)
    logs = np.hstack(list(LOG_MEL.log_powers([sound.astype(np.float32)])))
    features = (np.maximum(logs, logs.max() - 8) + 4) / 4
    return np.pad(features, ((0, 0), (0, found.width)))


@pytest.mark.parametrize("steps", [[0, 2, 700, 700, 3500, 9000], [0, 3000, 6000, 9000], [5000]])
def test_windows_are_parts_of_the_whole(steps: list[int]) -> None:
    """A click near the end sets the scale, also of the first windows, which do not contain it."""
    sound = 0.01 * sine(95, RATE)
    sound[-RATE] = 1.0
    expected, found = whole_features(sound), windows(sound)
    assert (found.frames, found.duration) == (9500, 95.0)
    for frame in steps:
        window = found.window_at(frame)
        assert window.shape == (80, 3000)
        np.testing.assert_allclose(window, expected[:, frame : frame + 3000], atol=1e-5)
        assert found._pending.shape[1] < 3 * 3000, "frames that are no longer needed are freed"


def test_a_short_recording_is_followed_by_silence() -> None:
    found, sound = windows(sine(1.001, RATE)), np.zeros(30 * RATE)
    assert (found.frames, found.duration) == (101, 1.001)
    sound[: round(1.001 * RATE)] = sine(1.001, RATE)
    expected = whole_features(sound)
    np.testing.assert_allclose(found.window_at(0), expected[:, :3000], atol=1e-5)
    np.testing.assert_allclose(found.window_at(60), expected[:, 60:3060], atol=1e-5)


def test_nothing_to_hear(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0), RATE)
    for audio in (np.zeros(0), tmp_path / "a.wav"):
        with pytest.raises(OutriderError, match=r"^prompt: .*is empty: 0 s"):
            Windows(Recording(audio, RATE), LOG_MEL, 30 * RATE)
    assert windows(np.ones(1)).frames == 1


def test_a_low_rate_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One second of a 1 Hz file becomes 16,000 samples, so few seconds are read at a time."""
    soundfile.write(tmp_path / "a.wav", np.full(120, 0.1), 1)
    most, real = [], soxr.ResampleStream.resample_chunk
    monkeypatch.setattr(
        soxr.ResampleStream,
        "resample_chunk",
        lambda self, piece, **more: most.append(len(piece)) or real(self, piece, **more),
    )
    found = Recording(tmp_path / "a.wav", RATE).blocks(10 * RATE)
    assert sum(map(len, found)) == 120 * RATE and max(most) == 10


def test_a_sample_whose_power_is_no_float_is_named() -> None:
    loud = np.array([0.1, 1e30, 1e300])
    with pytest.raises(OutriderError, match=r"far too large, after 0\.000 s"):
        list(Recording(loud, RATE).blocks(RATE))
