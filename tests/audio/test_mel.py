"""Features equal those of Transformers' extractor, for signals that each stress one part of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from runtime.audio import mel
from runtime.audio.mel import LogMel, scale_features

RATE, CHUNK = 16_000, 30 * 16_000
TIME = np.arange(CHUNK) / RATE


def noise(samples: int, size: float = 0.1) -> np.ndarray:
    return size * np.random.default_rng(samples).standard_normal(samples)


SIGNALS = {
    "silence": np.zeros(CHUNK),
    "noise of exactly 30 s": noise(CHUNK),
    "chirp": 0.5 * np.sin(2 * np.pi * (50 + 120 * TIME) * TIME),
    "clicks": 1.0 * (np.arange(CHUNK) % 8000 == 0),
    "short": noise(5000),
    "long": noise(65 * RATE + 77) + 0.1,
    "loud": noise(CHUNK, 100),
    "tiny": noise(CHUNK, 1e-6),
}


def features(samples: np.ndarray, mels: int = 80) -> np.ndarray:
    """Features by Outrider, from blocks that end anywhere in a frame."""
    padded = np.pad(samples, (0, max(0, CHUNK - len(samples)))).astype(np.float32)
    blocks = np.array_split(padded, 7)
    logs = np.hstack(list(LogMel(mels, RATE, 400, 160).log_powers(blocks)))
    return scale_features(logs, logs.max())


def expected(samples: np.ndarray, mels: int = 80) -> Iterator[np.ndarray]:
    """Features by both implementations in Transformers: PyTorch's and NumPy's."""
    extractor = WhisperFeatureExtractor(feature_size=mels)
    long = {"truncation": False, "padding": "longest"} if len(samples) > CHUNK else {}
    given = samples.astype(np.float32)
    yield extractor(given, sampling_rate=RATE, return_tensors="np", **long).input_features[0]
    padded = np.pad(given, (0, max(0, CHUNK - len(given))))
    yield extractor._np_extract_fbank_features(padded[None], "cpu")[0]


@pytest.mark.parametrize(
    ("name", "mels"), [*((name, 80) for name in SIGNALS), ("noise of exactly 30 s", 128)]
)
def test_features_are_those_of_transformers(name: str, mels: int) -> None:
    found = features(SIGNALS[name], mels)
    assert found.dtype == np.float32
    for theirs in expected(SIGNALS[name], mels):
        assert found.shape == theirs.shape
        np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-4)


def test_control_another_filter_or_window_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = SIGNALS["noise of exactly 30 s"]
    theirs = next(expected(sound))
    for broken in (
        (mel, "MAX_HERTZ", 7990.0), (np, "hanning", np.hamming)
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(*broken)
            assert np.abs(features(sound) - theirs).max() > 1e-3
