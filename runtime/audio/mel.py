"""Log-mel features as Whisper's feature extractor in Transformers computes them, in NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]  # [samples], mono, at the model's rate
MelFrames = npt.NDArray[np.float32]  # [mels, frames], powers or features

MAX_HERTZ = 8000.0  # Hz: upper edge of the last filter
POWER_FLOOR = np.float32(1e-10)  # lower bound of a filter's power, before the logarithm
DYNAMIC_RANGE = 8.0  # dynamic range in powers of ten: quieter values are raised to the bound
# Slaney's mel scale (Auditory Toolbox, 1998): linear up to 1 kHz, 27 steps per factor 6.4 above.
_BREAK_HZ, _BREAK_MEL, _HZ_PER_MEL = 1000.0, 15.0, 200 / 3
_LOG_STEP = np.log(6.4) / 27


def mel_filters(bins: int, mels: int, rate: int) -> npt.NDArray[np.float64]:
    """Triangular filters [mels, bins] over the bins of a spectrum from 0 to rate / 2, equally
    spaced on the mel scale up to `MAX_HERTZ` and of equal area (Slaney's norm)."""
    # The break is below MAX_HERTZ, so the end of the scale is in its logarithmic part.
    top = _BREAK_MEL + np.log(MAX_HERTZ / _BREAK_HZ) / _LOG_STEP
    scale = np.linspace(0, top, mels + 2)
    edges = np.where(
        scale < _BREAK_MEL,
        scale * _HZ_PER_MEL,
        _BREAK_HZ * np.exp(_LOG_STEP * (scale - _BREAK_MEL)),
    )[:, None]
    hertz = np.linspace(0, rate // 2, bins)
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    triangles: npt.NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
    return triangles * (2 / (edges[2:] - edges[:-2]))


class LogMel:
    """Computes features of samples that arrive in any number of blocks.

    mels: number of filters. rate: samples per second. n_fft: samples per frame. hop: samples from
    one frame to the next.
    """

    def __init__(self, mels: int, rate: int, n_fft: int, hop: int):
        self.n_fft, self.hop = n_fft, hop
        self._filters = mel_filters(n_fft // 2 + 1, mels, rate).astype(np.float32)
        # Hann's window in its periodic form.
        self._window = np.hanning(n_fft + 1)[:-1].astype(np.float32)

    def log_powers(self, blocks: Iterable[Samples]) -> Iterator[MelFrames]:
        """Logarithms (base 10) of the filters' powers, in arrays [mels, frames], at most one more
        than there are blocks. There are samples // hop frames in total; the middle of frame i is
        sample i * hop.

        The first block has more than n_fft / 2 samples, because the signal is mirrored at both
        ends.
        """
        edge = self.n_fft // 2
        pending: Samples | None = None
        count = 0
        for block in blocks:
            count += len(block)
            pending = (
                np.pad(block, (edge, 0), "reflect")
                if pending is None
                else np.append(pending, block)
            )
            # Hold back the last n_fft / 2 samples: if this is the end, they will be mirrored.
            frames = max(0, (len(pending) - self.n_fft) // self.hop)
            if frames:
                yield self._frames(pending, frames)
                pending = pending[frames * self.hop :]
                count -= frames * self.hop
        if pending is not None and (frames := count // self.hop):
            yield self._frames(np.pad(pending, (0, edge), "reflect"), frames)

    def _frames(self, samples: Samples, frames: int) -> MelFrames:
        windows = np.lib.stride_tricks.sliding_window_view(samples, self.n_fft)
        spectrum = np.fft.rfft(windows[: frames * self.hop : self.hop] * self._window)
        power = spectrum.real**2 + spectrum.imag**2
        logs: MelFrames = np.log10(np.maximum(self._filters @ power.T, POWER_FLOOR))
        return logs


def scale_features(logs: MelFrames, loudest: float) -> MelFrames:
    """The encoder's input features. loudest: the largest of all `log_powers` of the audio."""
    quietest = np.float32(loudest - DYNAMIC_RANGE)
    return ((np.maximum(logs, quietest) + 4) / 4).astype(np.float32, copy=False)
