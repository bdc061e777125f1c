"""The features of a recording, window by window; only those that a window needs are in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..files.errors import OutriderError
from .mel import LogMel, MelFrames, Samples, scale_features
from .recording import Recording


class Windows:
    """The windows of a recording that an encoder reads, in order, each from any frame on.

    They equal the features of the whole recording. These are scaled by its loudest frame, so the
    recording is read twice.

    log_mel: computes the features. size: samples of a window. A shorter recording is padded with
    silence; the last window of a longer one is padded with zeros, as in Transformers. Raises the
    errors of `Recording`, and OutriderError "prompt" if the recording is empty.
    """

    def __init__(self, recording: Recording, log_mel: LogMel, size: int):
        self._recording = recording
        self._size, self.width = size, size // log_mel.hop  # samples and frames of a window
        self._count, loudest = 0, -np.inf
        for logs in log_mel.log_powers(self._padded_blocks()):
            loudest = max(loudest, float(logs.max()))
        self._loudest = loudest
        self.duration = self._count / recording.rate  # seconds
        whole = self._count if self._count > self._size else self._count + log_mel.hop - 1
        self.frames = whole // log_mel.hop  # of the recording
        self._logs = log_mel.log_powers(self._padded_blocks())
        self._begin, self._pending = 0, np.empty((0, 0), np.float32)

    def _padded_blocks(self) -> Iterator[Samples]:
        self._count = 0
        for block in self._recording.blocks(self._size):
            # Only a first block that is short needs padding: later short ones end a recording.
            missing = self._size - len(block) if self._count == 0 else 0
            self._count += len(block)
            yield np.pad(block, (0, missing)) if missing else block
        if self._count == 0:
            raise OutriderError(
                "prompt", f"{self._recording.name} is empty: 0 s of audio",
                "Give a recording that has samples.",
            )  # fmt: skip

    def window_at(self, frame: int) -> MelFrames:
        """The window [mels, width] from this frame on, which is not before that of the last
        call."""
        while self._begin + self._pending.shape[1] < frame + self.width:
            if (block := next(self._logs, None)) is None:
                break
            logs = scale_features(block, self._loudest)
            skipped = min(max(0, frame - self._begin), self._pending.shape[1])
            rest = self._pending[:, skipped:]
            self._pending = np.hstack([rest, logs]) if rest.size else logs
            self._begin += skipped
        window = self._pending[:, frame - self._begin :][:, : self.width]
        return np.pad(window, ((0, 0), (0, self.width - window.shape[1])))
