"""What an encoder reads of a request: token ids, or features of a sound; and what is not said."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from ..backends.engine import Features, Source, source_ids
from ..files.audio import FeatureFacts
from ..files.errors import OutriderError, refuse_first
from ..files.manifest import Pair
from ..files.rules import TextRules
from ..sampling.processors import (
    BadWords,
    LastToken,
    LogitsProcessor,
    NoRepeatNgram,
    SuppressTokens,
)
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
        (options.encoder_no_repeat_ngram_size and pair.target.reads,
         "encoder_no_repeat_ngram_size is of sources that are tokens, and the target reads "
         "features", "Leave it out."),
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


def rules_of(
    options: Options, pair: Pair, prompt: Sequence[int], source: Source
) -> tuple[int, tuple[LogitsProcessor, ...]]:
    """The least new tokens of a text, and its logits processors: what the options ask for, and
    where they do not say, the target's generation config."""
    own, audio, ends = pair.rules or TextRules(), pair.audio, pair.tokenizer.eos_token_ids
    asked = {
        name: getattr(own, name) if (value := getattr(options, name)) is None else value
        for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids")
    }
    found: list[LogitsProcessor] = []
    if size := asked["no_repeat_ngram_size"]:
        found.append(NoRepeatNgram(size))
    if size := asked["encoder_no_repeat_ngram_size"]:
        # A decoder-only model's source is its prompt, as in Transformers.
        found.append(NoRepeatNgram(size, prompt if pair.start_ids is None else source_ids(source)))
    # As in Transformers, the end of the text is no bad word.
    words = () if asked["bad_words_ids"] is None else asked["bad_words_ids"]
    if words := [list(w) for w in words if list(w) not in [[end] for end in ends]]:
        found.append(BadWords(words))
    least = options.min_new_tokens
    if least is None:
        least = own.min_new_tokens or max(0, (own.min_length or 0) - len(prompt))
        least = min(least, options.max_new_tokens)
    if own.forced_eos_token_id is not None and not options.ignore_eos:
        longest = min(len(prompt) + options.max_new_tokens, pair.max_len)
        found = [LastToken(longest - 1, own.forced_eos_token_id, found)]
        least = min(least, longest - 1 - len(prompt))
    if audio and (audio.suppress_tokens or audio.begin_suppress_tokens):
        found.append(SuppressTokens(audio.suppress_tokens, audio.begin_suppress_tokens))
    return least, (*found, *options.processors)


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
