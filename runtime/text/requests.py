"""Builds the `Request` for a prompt and `Options`: ids or features to read, rules, the draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..backends.engine import Features, Source, source_ids
from ..checks import check_ids
from ..decoder import Decoder
from ..drafts.registry import KINDS
from ..files.errors import OutriderError, refuse_first
from ..files.generation import FeatureFacts, TextRules
from ..files.graphs import Pair
from ..gamma.measured import Policy
from ..gamma.policy import make_policy
from ..sampling.processors import (
    BadWords,
    ForcedLastToken,
    LogitsProcessor,
    NoRepeatNgram,
    SuppressTokens,
)
from ..sampling.warp import SamplingParams
from ..sequence import Request
from .options import Message, Options, Prompt
from .results import Transcript
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .engine import TextEngine

_SOURCE_REMEDY = "Pass source=..., or --source TEXT on the command line."


def make_request(
    engine: TextEngine, prompt: Prompt | None, options: Options
) -> tuple[Request, Transcript]:
    """The `Request` as it would be run, and its `Transcript`. Raises what `generate` raises."""
    options.check()
    options = options.seeded()
    decoder, pair, tokenizer = engine.decoder, engine.manifest.pair, engine.tokenizer
    draft, gamma = _draft_of(options, decoder, pair)
    if gamma == 0:
        options.check_plain()
    params = options.sampling()
    if params.verify == "coupled" and engine.bits.forgone:
        raise OutriderError(
            "option",
            "verify=coupled promises the same text for every gamma, which plain_width=1 rules out",
            "Leave one of them out.",
        )
    _check_ids(options, params, decoder.vocab_size)
    source = read_source(options, pair, tokenizer)
    ids = _prompt_ids(prompt, options, pair, tokenizer)
    check_ids(ids, decoder.target.vocab_size)  # before the tokenizer looks them up
    min_new_tokens, processors = text_rules(options, pair, ids, source)
    transcript = Transcript(tokenizer, ids, params.seed, options)
    request = Request(
        prompt=ids,
        params=params,
        gamma=gamma,
        draft=draft,
        draft_temperature=options.draft_temperature,
        draft_threshold=options.draft_threshold,
        policy=_policy(options, params, draft, gamma, decoder),
        max_new_tokens=options.max_new_tokens,
        min_new_tokens=min_new_tokens,
        eos_token_ids=frozenset(pair.tokenizer.eos_token_ids),
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        stop=transcript.push,
        source=source,
        second_token_candidates=_language_tokens(prompt, pair),
        processors=processors,
    )
    decoder.check(request)
    return request, transcript


# The draft


def _draft_of(options: Options, decoder: Decoder, pair: Pair) -> tuple[str, int]:
    """The kind of draft, and gamma. Raises "option"."""
    kind, gamma = options.draft, options.gamma
    if isinstance(gamma, str):
        gamma = decoder.max_gamma
    draft_not_loaded = decoder.draft is None and pair.draft is not None
    if draft_not_loaded and (
        KINDS[kind].needs_model() if kind in KINDS else gamma and kind is None
    ):
        raise OutriderError(
            "option",
            (f"draft={kind}" if kind else f"gamma={options.gamma}")
            + " needs the draft model, and the bundle was opened without it",
            "Leave that option out, or load the bundle with draft_model=True.",
        )
    if kind is None:
        kind = "model" if decoder.draft is not None else pair.lookup
    if kind is None or kind == "none":
        return "model", gamma or 0
    if gamma is None:
        gamma = min(KINDS[kind].usual_gamma, decoder.max_gamma)
    return kind, gamma


def _policy(
    options: Options, params: SamplingParams, draft: str, gamma: int, decoder: Decoder
) -> Policy | None:
    named = options.gamma if isinstance(options.gamma, str) else gamma
    fallback, max_gamma = options.fallback == "auto", decoder.max_gamma
    if not (fallback or isinstance(named, str)) or not 0 < gamma <= max_gamma:
        return None  # `Decoder.check` refuses what is out of range
    settings = (replace(params, seed=0), options.draft_temperature)
    return make_policy(named, decoder.shared_gamma(draft), fallback=fallback, settings=settings)


# The prompt and the source


def _check_ids(options: Options, params: SamplingParams, width: int) -> None:
    """Refuse options that name nonexistent token ids. Raises "option"."""
    words = () if options.bad_words_ids is None else options.bad_words_ids  # or an array
    named = {
        "stop_token_ids": options.stop_token_ids,
        "logit_bias": [*dict(params.logit_bias)],
        "bad_words_ids": [token for word in words for token in word],
    }
    refuse_first(
        (not 0 <= token < width, f"{name}: the token id {token} does not exist",
         f"Choose from 0 to {width - 1}.")
        for name, tokens in named.items()
        for token in tokens
    )  # fmt: skip


def _prompt_ids(
    prompt: Prompt | None, options: Options, pair: Pair, tokenizer: Tokenizer
) -> list[int]:
    """The token ids of a prompt: text as it is or through the chat template, messages, or ids.

    As in Transformers, every prompt of an encoder-decoder begins with the decoder's start token,
    except that the ids for a model that transcribes are taken as they are. Raises OutriderError
    "prompt" or "option".
    """
    start = pair.start_ids
    if start is None:
        if prompt is None:
            raise OutriderError("prompt", "there is no prompt", "Pass one.")
        return _encode_prompt(prompt, options, pair, tokenizer)
    if prompt is None and isinstance(options.source, str):
        return list(start)
    ids = _encode_prompt(() if prompt is None else prompt, options, pair, tokenizer)
    if not ids:
        return list(start)
    return ids if pair.audio or ids[0] == start[0] else [start[0], *ids]


def _encode_prompt(prompt: Prompt, options: Options, pair: Pair, tokenizer: Tokenizer) -> list[int]:
    special, start = options.special_tokens, pair.start_ids
    if isinstance(prompt, str):
        templated = tokenizer.chat_template is not None and start is None
        chat = templated if options.chat is None else options.chat
        if options.system is not None and not chat:
            raise OutriderError(
                "option",
                "a system message needs a chat template",
                "Put it into the prompt itself, or load the bundle with a template "
                "(chat_template=FILE, --chat-template FILE).",
            )
        if not chat:
            # An encoder-decoder's source has the special tokens around it, and not the prompt.
            return tokenizer.encode(
                prompt, add_special_tokens=start is None, special_tokens=special
            )
        prompt = [{"role": "user", "content": prompt}]
    items = _items(prompt)
    if items and isinstance(items[0], Mapping):
        if start is not None:
            raise OutriderError("prompt", decoders_only("messages", pair), _SOURCE_REMEDY)
        if options.chat is False:
            cause = "messages need the chat template, and chat=False leaves it out"
            raise OutriderError("option", cause, "Leave chat out, or give the prompt as text.")
        messages = cast(list[Message], items)
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        return tokenizer.encode_chat(messages, special_tokens=special)
    if not items and start is None:
        return []  # messages or ids: refused as empty in either case
    refuse_first(
        (changed, f"{name} has no meaning for a prompt of token ids",
         "Give the prompt as text or as messages.")
        for name, changed in (
            ("chat=True", options.chat), ("system", options.system is not None),
            ("special_tokens", special != Options.special_tokens),
        )
    )  # fmt: skip
    return cast(list[int], items)


def decoders_only(what: str, pair: Pair) -> str:
    """Why an encoder-decoder refuses something."""
    return f"{what} are for decoder-only models, and the target is a {pair.target.architecture}"


def _items(prompt: Any) -> list[Any]:
    """A list of messages or token ids. Raises OutriderError "prompt" for anything else."""
    wrong = isinstance(prompt, bytes | bytearray | Mapping) or getattr(prompt, "ndim", 1) == 0
    if isinstance(prompt, Iterable) and not wrong:
        items = list(prompt)
        if all(isinstance(item, Mapping) for item in items):
            return items
        with suppress(TypeError):
            if bool not in {type(item) for item in items}:
                return [index(item) for item in items]
    raise OutriderError(
        "prompt",
        f"the prompt ({type(prompt).__name__}) is neither text, nor messages, nor token ids",
        "Pass a str, a list of dicts with role and content, or a list of ints.",
    )


def _language_tokens(prompt: Prompt | None, pair: Pair) -> list[int]:
    """`Request.second_token_candidates`: the language tokens, if the model is to
    detect the language."""
    audio = pair.audio
    if audio is None or not audio.language_detected or (prompt is not None and len(prompt)):
        return []
    return sorted(audio.lang_to_id.values())


def read_source(options: Options, pair: Pair, tokenizer: Tokenizer) -> Source:
    """The source as token ids or features; empty for decoder-only models. Raises OutriderError
    "prompt" or "option"."""
    source, architecture = options.source, pair.target.architecture
    if pair.start_ids is None:
        if source is None:
            return []
        cause = f"a source is for encoder-decoders, and the target is a {architecture}"
        raise OutriderError("option", cause, "Give it as the prompt.")
    refuse_first([
        (options.chat or options.system is not None,
         decoders_only("chat templates", pair), "Leave chat and system out."),
        (options.encoder_no_repeat_ngram_size and pair.target.reads,
         "encoder_no_repeat_ngram_size applies to a source of tokens, and the target reads "
         "features", "Leave it out."),
    ])  # fmt: skip
    if pair.target.reads is not None:
        return _features(source, pair.target.reads, architecture)
    if isinstance(source, str):
        source = tokenizer.encode(source, special_tokens=options.special_tokens)
    if source is None or len(source) == 0:
        raise OutriderError(
            "prompt",
            f"there is no source, and the target, a {architecture}, needs one",
            _SOURCE_REMEDY,
        )
    if isinstance(source, np.ndarray) and (source.ndim != 1 or source.dtype.kind not in "iu"):
        raise OutriderError(
            "prompt",
            f"the source is {_array_text(source)}, and the target, a {architecture}, reads text",
            "Pass text or token ids, or use a bundle of a model that transcribes.",
        )
    return [index(token) for token in source]


def text_rules(
    options: Options, pair: Pair, prompt: Sequence[int], source: Source
) -> tuple[int, tuple[LogitsProcessor, ...]]:
    """The minimum number of new tokens, and the logits processors, from the options, or for options
    not given from the target's generation config."""
    config_rules, audio = pair.rules or TextRules(), pair.audio

    def value(name: str) -> Any:
        given = getattr(options, name)
        return getattr(config_rules, name) if given is None else given

    found: list[LogitsProcessor] = []
    if size := value("no_repeat_ngram_size"):
        found.append(NoRepeatNgram(size))
    if size := value("encoder_no_repeat_ngram_size"):
        # A decoder-only model's source is its prompt, as in Transformers.
        found.append(NoRepeatNgram(size, prompt if pair.start_ids is None else source_ids(source)))
    words = value("bad_words_ids")
    if words is not None:
        # As in Transformers, end-of-text is never a bad word.
        ends = [[end] for end in pair.tokenizer.eos_token_ids]
        words = [word for word in map(list, words) if word not in ends]
    if words:
        found.append(BadWords(words))
    min_new_tokens = options.min_new_tokens
    if min_new_tokens is None:
        # As in Transformers, which counts the tokens forced after the start token as new.
        forced = len(prompt) - 1 if audio is None and list(prompt) == pair.start_ids else 0
        counted = len(prompt) if config_rules.min_new_tokens is None else forced
        min_new_tokens = max(
            0, (config_rules.min_new_tokens or config_rules.min_length or 0) - counted
        )
        min_new_tokens = min(min_new_tokens, options.max_new_tokens)
    if config_rules.forced_eos_token_id is not None and not options.ignore_eos:
        longest = min(len(prompt) + options.max_new_tokens, pair.max_len)
        found = [ForcedLastToken(longest - 1, config_rules.forced_eos_token_id, found)]
        min_new_tokens = min(min_new_tokens, longest - 1 - len(prompt))
    if audio and (audio.suppress_tokens or audio.begin_suppress_tokens):
        found.append(SuppressTokens(audio.suppress_tokens, audio.begin_suppress_tokens))
    return min_new_tokens, (*found, *options.processors)


def _features(source: Any, wanted: FeatureFacts, architecture: str) -> Features:
    shape = wanted.feature_size, wanted.frames
    reads = f"the target, a {architecture}, reads float32 log-mel features {list(shape)}"
    if source is None:
        raise OutriderError(
            "prompt",
            f"there is no source: {reads}",
            "Transcribe a recording (--audio FILE on the command line), or pass source=array.",
        )
    if not isinstance(source, np.ndarray):
        what = "text" if isinstance(source, str) else "token ids"
        raise OutriderError(
            "prompt",
            f"the source is {what}, and {reads}",
            "Transcribe a recording (--audio FILE), or use a bundle of a model that reads text.",
        )
    if source.dtype != np.float32 or source.shape != shape:
        raise OutriderError(
            "prompt",
            f"the source is {_array_text(source)}, and {reads}",
            f"Compute them from {wanted.n_samples:,} samples at {wanted.sampling_rate:,} Hz, "
            "padded.",
        )
    if not np.isfinite(source).all():
        raise OutriderError(
            "prompt", "the source has NaN or infinity among its features", "Check the recording."
        )
    return Features(source)


def _array_text(source: np.ndarray) -> str:
    return f"{source.dtype} {list(source.shape)}"
