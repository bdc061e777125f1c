"""Audio from files and arrays as blocks of samples, mono and at the model's sample rate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError, convert_errors, first_line, importing
from .mel import Samples

if TYPE_CHECKING:
    import soundfile

Audio = str | PathLike[str] | npt.NDArray[np.floating[Any]]

MAX_SAMPLE = 1e12  # largest sample for which float32 can hold the powers of the spectrum
_INSTALL_REMEDY = "Install the audio libraries: pip install soundfile soxr."
# What libsndfile reports about a header that announces more bytes than there are. A program that
# writes to a pipe does not know the size, and announces the largest one (`_UNKNOWN_SIZE` or more).
_TRUNCATED = re.compile(
    r"^ *(?:data|SSND|Data Size|riff|Riff size) *: (\d+) \(should be (\d+)\)", re.MULTILINE
)
_UNKNOWN_SIZE = 0x7FFF_0000
_FORMAT_REMEDY = "Give a WAV or FLAC file, or convert it: ffmpeg -i <file> audio.wav"


class Recording:
    """Audio that can be read any number of times and is never in memory as a whole.

    audio: a file that libsndfile reads (WAV, FLAC and others), which is mixed to mono and resampled
    to `rate` if necessary; or float samples [n] at `rate`, from -1 to 1. rate: samples per second.
    Raises OutriderError "prompt" if there is no such file, or the array is not as described.
    """

    def __init__(self, audio: Audio, rate: int):
        self.rate = rate
        self._path: Path | None = None
        self._samples = np.empty(0, np.float32)
        if isinstance(audio, np.ndarray):
            if audio.ndim != 1 or not np.issubdtype(audio.dtype, np.floating):
                raise OutriderError(
                    "prompt",
                    f"the audio is {audio.dtype} {list(audio.shape)}, not float samples [n]",
                    "Mix the channels, and divide integers by their full scale (32768 for int16).",
                )
            with np.errstate(over="ignore"):  # infinity is refused later, with too large samples
                self._samples, self.name = audio.astype(np.float32, copy=False), "the audio"
        elif isinstance(audio, str | PathLike):
            check_file(audio)
            self._path, self.name = Path(audio), str(audio)
        else:
            raise OutriderError(
                "prompt", f"the audio is of type {type(audio).__name__}",
                "Give the path of a file, or a NumPy array of float samples.",
            )  # fmt: skip

    def blocks(self, size: int) -> Iterator[Samples]:
        """Blocks of `size` samples; the last one may be shorter. Raises OutriderError "prompt" if a
        sample is not a number or the file is damaged, "backend" if an audio library is missing."""
        pending: list[Samples] = []
        missing = size
        if self._path is not None:
            pieces = self._read_file(self._path, size)
        else:
            starts = range(0, len(self._samples), size)
            pieces = self._check_samples((self._samples[i : i + size] for i in starts), self.rate)
        for piece in pieces:
            rest = piece
            while len(rest) >= missing:
                yield np.concatenate([*pending, rest[:missing]])
                rest, pending, missing = rest[missing:], [], size
            pending.append(rest)
            missing -= len(rest)
        if missing < size:
            yield np.concatenate(pending)

    def _read_file(self, path: Path, size: int) -> Iterator[Samples]:
        with importing("soundfile", _INSTALL_REMEDY):
            import soundfile
        with self._reading_errors(soundfile.LibsndfileError), soundfile.SoundFile(path) as file:
            found = _TRUNCATED.search(file.extra_info)
            if found and int(found[2]) < int(found[1]) < _UNKNOWN_SIZE:
                raise OutriderError(
                    "prompt",
                    f"{self.name} is truncated: it has {found[2]} of {found[1]} bytes of audio",
                    "Copy it again, or keep what there is: ffmpeg -i <file> audio.wav",
                )
            # Resampling from a low rate makes many samples of one.
            piece = max(1, min(size, size * file.samplerate // self.rate))
            pieces = self._check_samples(self._read_mono(file, piece), file.samplerate)
            if file.samplerate != self.rate:
                pieces = self._resample(pieces, file.samplerate)
            yield from pieces

    def _read_mono(self, file: soundfile.SoundFile, size: int) -> Iterator[Samples]:
        while len(piece := file.read(size, dtype="float32", always_2d=True)):
            yield piece.mean(axis=1)

    def _resample(self, pieces: Iterable[Samples], rate: int) -> Iterator[Samples]:
        with importing("soxr", _INSTALL_REMEDY):
            import soxr
        what = f"{self.name} has {rate} samples per second"
        with convert_errors("prompt", what, _FORMAT_REMEDY):
            stream = soxr.ResampleStream(rate, self.rate, 1, dtype="float32")
        for piece in pieces:
            yield stream.resample_chunk(piece)
        yield stream.resample_chunk(np.empty(0, np.float32), last=True)

    def _check_samples(self, pieces: Iterable[Samples], rate: int) -> Iterator[Samples]:
        begin = 0
        for piece in pieces:
            invalid = np.flatnonzero(~(np.abs(piece) <= MAX_SAMPLE))
            if len(invalid):
                at = begin + int(invalid[0])
                kind = "far too large" if np.isfinite(piece[invalid[0]]) else "not a finite number"
                raise OutriderError(
                    "prompt",
                    f"{self.name} has a sample that is {kind}, after {at / rate:.3f} s",
                    "Create it again: the program that wrote it failed there.",
                )
            begin += len(piece)
            yield piece

    @contextmanager
    def _reading_errors(self, error_class: type[Exception]) -> Iterator[None]:
        try:
            yield
        except error_class as error:
            reason = getattr(error, "error_string", first_line(error)).rstrip(". ")
            cause = f"{self.name} cannot be read as audio: {reason}"
            raise OutriderError("prompt", cause, _FORMAT_REMEDY) from None


def check_file(audio: str | PathLike[str]) -> None:
    """Raise OutriderError "prompt" if this is not a readable file."""
    path = Path(audio)
    try:
        if path.exists() and not path.is_file():  # a pipe cannot be read twice
            cause = f"{path} is a folder" if path.is_dir() else f"{path} is not a regular file"
            raise OutriderError("prompt", cause, _FORMAT_REMEDY)
        path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        cause = f"cannot read {path}: {getattr(error, 'strerror', None) or first_line(error)}"
        raise OutriderError("prompt", cause, "Give the path of an audio file.") from None
