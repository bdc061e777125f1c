"""The features of a recording, window by window, of which no more is held than one needs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..files.errors import OutriderError
from .mel import LogMel, MelFrames, Samples, scaled
from .recording import Recording


class Windows:
    """What an encoder reads of a recording, from any frame on, one after the other.

    Equal to features of the whole. Their scale is that of the loudest frame, wherever it is, so the
    recording is read twice.

    log_mel: what makes them. size: samples of a window. A recording that is shorter is followed by
    silence; of a longer one the last window is padded with 0, as in Transformers. Raises as
    `Recording`, and "prompt" for an empty one.
    """

    def __init__(self, recording: Recording, log_mel: LogMel, size: int):
        self._recording = recording
        self._size, self.width = size, size // log_mel.hop  # of a window: samples, frames
        self._count, loudest = 0, -np.inf
        for logs in log_mel.logs(self._padded()):
            loudest = max(loudest, float(logs.max()))
        self._loudest = loudest
        self.duration = self._count / recording.rate  # seconds
        whole = self._count if self._count > self._size else self._count + log_mel.hop - 1
        self.frames = whole // log_mel.hop  # of sound
        self._logs = log_mel.logs(self._padded())
        self._begin, self._held = 0, np.empty((0, 0), np.float32)

    def _padded(self) -> Iterator[Samples]:
        self._count = 0
        for block in self._recording.blocks(self._size):
            # Only the first one can be short and not the end of others.
            missing = self._size - len(block) if self._count == 0 else 0
            self._count += len(block)
            yield np.pad(block, (0, missing)) if missing else block
        if self._count == 0:
            raise OutriderError(
                "prompt", f"{self._recording.name} is empty: 0 s of sound",
                "Give a recording of something.",
            )  # fmt: skip

    def at(self, frame: int) -> MelFrames:
        """[mels, width], from this frame on; no earlier one than asked before."""
        while self._begin + self._held.shape[1] < frame + self.width:
            if (more := next(self._logs, None)) is None:
                break
            logs = scaled(more, self._loudest)
            skipped = min(max(0, frame - self._begin), self._held.shape[1])
            rest = self._held[:, skipped:]
            self._held = np.hstack([rest, logs]) if rest.size else logs
            self._begin += skipped
        window = self._held[:, frame - self._begin :][:, : self.width]
        return np.pad(window, ((0, 0), (0, self.width - window.shape[1])))
