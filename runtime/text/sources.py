"""What an encoder reads of a request: token ids, or features of a sound; and what is never said."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from ..backends.engine import Features, Source
from ..files.audio import FeatureFacts
from ..files.errors import OutriderError, refuse_first
from ..files.manifest import Pair
from ..sampling.processors import LogitsProcessor, SuppressTokens
from .options import Options
from .tokenizer import Tokenizer


def read_source(options: Options, pair: Pair, tokenizer: Tokenizer) -> Source:
    """No ids for decoder-only models. Raises OutriderError "prompt" or "option"."""
    source, architecture = options.source, pair.target.architecture
    if pair.start_ids is None:
        if source is None:
            return []
        raise OutriderError(
            "option",
            f"a source is for encoder-decoders, and the target is a {architecture}",
            "Give it as the prompt.",
        )
    refuse_first([
        (options.chat or options.system is not None,
         f"chat templates are of decoder-only models, and the target is a {architecture}",
         "Leave chat and system out."),
    ])  # fmt: skip
    if pair.target.reads is not None:
        return _features(source, pair.target.reads, architecture)
    if isinstance(source, str):
        return tokenizer.encode(source, special_tokens=options.special_tokens)
    if source is None or len(source) == 0:
        raise OutriderError(
            "prompt",
            f"there is no source, which the target, a {architecture}, reads",
            "Give it one: source=..., on the command line --source TEXT.",
        )
    if isinstance(source, np.ndarray) and (source.ndim != 1 or source.dtype.kind not in "iu"):
        raise OutriderError(
            "prompt",
            f"the source is {_shown(source)}, and the target, a {architecture}, reads text",
            "Give it text or token ids, or use a bundle of a model that transcribes.",
        )
    return [index(token) for token in source]


def checkpoint_processors(pair: Pair) -> tuple[LogitsProcessor, ...]:
    """Those that the target's generation config asks for, of all requests."""
    audio = pair.audio
    if audio is None or not (audio.suppress_tokens or audio.begin_suppress_tokens):
        return ()
    return (SuppressTokens(audio.suppress_tokens, audio.begin_suppress_tokens),)


def _features(source: Any, wanted: FeatureFacts, architecture: str) -> Features:
    shape = wanted.feature_size, wanted.frames
    reads = f"the target, a {architecture}, reads float32 log-mel features {list(shape)}"
    if source is None:
        raise OutriderError(
            "prompt",
            f"there is no source: {reads}",
            "Transcribe a recording, on the command line --audio FILE, or give source=array.",
        )
    if not isinstance(source, np.ndarray):
        what = "text" if isinstance(source, str) else "token ids"
        raise OutriderError(
            "prompt",
            f"the source is {what}, and {reads}",
            "Transcribe a recording, --audio FILE, or use a bundle of a model that reads text.",
        )
    if source.dtype != np.float32 or source.shape != shape:
        raise OutriderError(
            "prompt",
            f"the source is {_shown(source)}, and {reads}",
            f"Make them of {wanted.n_samples:,} samples at {wanted.sampling_rate:,} Hz, padded.",
        )
    if not np.isfinite(source).all():
        raise OutriderError(
            "prompt", "the source has NaN or infinity among its features", "Check the recording."
        )
    return Features(source)


def _shown(source: np.ndarray) -> str:
    return f"{source.dtype} {list(source.shape)}"
