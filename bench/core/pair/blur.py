"""A draft that agrees with its target at a given rate: the target itself with added noise.

Every matrix gets Gaussian noise with `noise` times its own standard deviation, from the same random
numbers at every size. Bisection finds the size at which alpha, the mean of sum min(p, q) at
temperature 1 (Corollary 3.6), has the requested value on held-out text. Noise can only lower alpha,
which is 1 without it.

Alpha depends on the text. In decoding, the text is the target's own output; the suites report the
acceptance rate on that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from models.corpus import collect
from models.measure import measure
from runtime.files.errors import OutriderError
from runtime.files.folders import refuse_foreign, write_folder
from runtime.files.progress import stage

from .grow import load_llama, write_checkpoint

WINDOWS, WINDOW = 32, 256  # of text: 8,160 predictions, which determine alpha to about 0.005
ALPHA_TOLERANCE = 1e-3  # the bisection ends this close to the requested alpha
FIRST_NOISE = 0.05
MAX_TRIES = 30


def blur(target: Path, out: Path, alpha: float) -> None:
    """Write `target` with noise to `out`, which must be new or empty.

    Raises OutriderError of kind "checkpoint", "architecture", "option" or "disk".
    """
    refuse_foreign(out, "config.json")
    original, model = load_llama(target), load_llama(target)
    windows = _windows(target, model.config.max_position_embeddings)
    with stage("draft", f"find noise for alpha {alpha:g}") as progress:
        noise, found = bisect(_alpha_of_noise(original, model, windows), alpha)
        progress.note = f"noise {noise:.4f}, alpha {found:.3f}"
    with write_folder(out, "config.json") as partial:
        write_checkpoint(model, target, partial)


def _windows(folder: Path, context: int) -> torch.Tensor:
    """int64 [WINDOWS or fewer, WINDOW], spread over the held-out texts; each window begins with the
    first token of its text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    width = min(WINDOW, context)
    found = []
    for text in collect().held_out:
        ids = tokenizer(text).input_ids
        found += [ids[:1] + ids[i : i + width - 1] for i in range(1, len(ids) - width + 2, width)]
    return torch.tensor(found[:: -(-len(found) // WINDOWS)])


def _alpha_of_noise(target: Any, draft: Any, windows: torch.Tensor) -> Callable[[float], float]:
    """A function that sets the draft's noise to a given size and returns its acceptance rate."""
    generator = torch.Generator().manual_seed(0)
    matrices = [p for p in draft.parameters() if p.dim() > 1]
    clean_matrices = [p.detach().clone() for p in matrices]
    noise = [torch.randn(p.shape, generator=generator) * p.std() for p in matrices]

    def alpha_of(size: float) -> float:
        with torch.no_grad():
            for matrix, clean, random in zip(matrices, clean_matrices, noise, strict=True):
                matrix.copy_(clean + size * random)
        return measure(target, draft, windows).acceptance_rate

    return alpha_of


def bisect(alpha_of: Callable[[float], float], alpha: float) -> tuple[float, float]:
    """Find the size of noise for an acceptance rate of alpha. Returns the size and the rate that
    was reached; the draft is left with that noise."""
    size, low, high = FIRST_NOISE, 0.0, math.inf
    for _ in range(MAX_TRIES):
        found = alpha_of(size)
        if abs(found - alpha) <= ALPHA_TOLERANCE:
            return size, found
        if found > alpha:
            low = size
        else:
            high = size
        size = (low + high) / 2 if high < math.inf else 2 * low
    raise OutriderError(
        "option",
        f"no noise gave an acceptance rate of {alpha:g}",
        "Use a value further from 0 and 1.",
    )
