"""Validates a request against a decoder, before a slot is taken.

`Options.check` has already refused what no bundle could run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .backends.engine import source_ids
from .drafts.registry import KINDS
from .files.errors import OutriderError, refuse_first
from .sequence import Request

HOST_ONLY_PARAMS = ("frequency_penalty", "presence_penalty", "logit_bias")


@dataclass(frozen=True)
class Limits:
    """What a decoder supports.

    vocab_size: number of tokens; embeddings: number of ids that the target can read. max_len,
    max_gamma: of the bundle; context: the largest max_len that it could be built with, None if
    unknown. kinds, on_host: see `Rounds`. has_model: whether there is a draft model.
    """

    vocab_size: int
    embeddings: int
    max_len: int
    max_gamma: int
    kinds: frozenset[str]
    has_model: bool
    on_host: bool
    context: int | None = None


def check_request(request: Request, limits: Limits) -> None:
    """Refuse what cannot be run. Raises OutriderError "prompt" or "option"."""
    length, gamma = len(request.prompt), request.gamma
    read = source_ids(request.source)
    if (source := len(read)) > limits.max_len:
        raise OutriderError(
            "prompt",
            f"the source has {source:,} tokens, and the bundle's encoder takes {limits.max_len:,}",
            _length_remedy(source, limits),
        )
    check_ids(read, limits.embeddings, "source")
    if length == 0:
        raise OutriderError("prompt", "the prompt is empty", "Give it at least one token.")
    if length >= limits.max_len:
        raise OutriderError(
            "prompt",
            f"the prompt has {length:,} tokens, and the bundle's context is {limits.max_len:,}",
            _length_remedy(length + request.max_new_tokens, limits),
        )
    check_ids(request.prompt, limits.embeddings)
    if gamma:
        _check_draft(request, limits)
    unsupported = () if limits.on_host else HOST_ONLY_PARAMS
    gamma_remedy = f"Choose gamma from 0 to {limits.max_gamma}, or build with MAX_GAMMA."
    refuse_first([
        (gamma < 0, f"gamma={gamma} is negative", gamma_remedy),
        (gamma > limits.max_gamma,
         f"gamma={gamma} is over the {limits.max_gamma} that the bundle was built for",
         gamma_remedy),
        *((getattr(request.params, name), f"{name} is not supported by the GPU sampling kernel",
           "Leave it out, or use a bundle that runs on the CPU.") for name in unsupported),
        (request.processors and not limits.on_host,
         "no_repeat_ngram_size, bad_words_ids, forced_eos_token_id and processors need logits on "
         "the CPU, where a GPU does not copy them", "Leave them out (0, [] and ignore_eos turn off "
         "the checkpoint's), or use a bundle that runs on the CPU."),
        (request.logprobs is not None and not 0 <= request.logprobs <= limits.vocab_size,
         f"logprobs={request.logprobs} is out of range",
         f"Choose from 0 to {limits.vocab_size}, the size of the vocabulary."),
    ])  # fmt: skip


def check_ids(prompt: Sequence[int], embeddings: int, what: str = "prompt") -> None:
    """Refuse ids that the target has no embedding for. Raises "prompt"."""
    odd = next((token for token in prompt if not 0 <= token < embeddings), None)
    if odd is not None:
        raise OutriderError(
            "prompt",
            f"the {what} contains token id {odd}, and the model has only 0 to {embeddings - 1}",
            f"Remove that token from the {what} or the chat template.",
        )


def _length_remedy(wanted: int, limits: Limits) -> str:
    """The remedy for a prompt or source that does not fit, within the model's own limit."""
    if limits.context is None or wanted <= limits.context:
        return f"Shorten it, or build the bundle with MAX_LEN={wanted}."
    if limits.max_len < limits.context:
        return f"Shorten it, and build with MAX_LEN={limits.context}, the model's maximum."
    return "Shorten it: this is the model's maximum."


def _check_draft(request: Request, limits: Limits) -> None:
    """Refuse a draft that is not available, or that does not support the request's options."""
    name, has_temperature = request.draft, request.draft_temperature is not None
    kind, has_threshold = KINDS[name], request.draft_threshold > 0
    if name not in limits.kinds:
        raise _unavailable_draft_error(name, request.gamma, limits)
    refuse_first([
        (kind.point_masses and request.params.verify == "sigmoid",
         "verify=sigmoid needs the draft's logits, and a lookup has none",
         "Use verify=token, or the draft model."),
        ((has_temperature or has_threshold) and not limits.on_host,
         "draft_temperature and draft_threshold are only for the CPU in this version",
         "Leave them out."),
        (has_temperature and request.params.temperature == 0,
         "draft_temperature has no effect at temperature=0",
         "Leave it out, or sample with temperature above 0."),
        (has_temperature and not 1e-3 <= (request.draft_temperature or 0) <= 1e3,
         f"draft_temperature={request.draft_temperature} is out of range",
         "It must be from 0.001 to 1000."),
        (not 0 <= request.draft_threshold < 1,
         f"draft_threshold={request.draft_threshold} is out of range",
         "It must be 0 (off) or a probability below 1."),
        ((has_temperature or has_threshold) and kind.point_masses,
         f"draft={name} has no probabilities for a temperature or threshold",
         "Leave them out, or use the draft model."),
        (has_threshold and kind.at_once, f"draft={name} always drafts gamma tokens",
         "Leave draft_threshold out, or use draft=model."),
        (has_threshold and request.policy is not None,
         "draft_threshold and a gamma that is chosen for each round are two ways to stop early",
         "Use only one of them."),
    ])  # fmt: skip


def _unavailable_draft_error(name: str, gamma: int, limits: Limits) -> OutriderError:
    """The error for a kind of draft that is not available."""
    kind, on_host = KINDS[name], limits.on_host
    if kind.needs_model() and not limits.has_model:
        return OutriderError(
            "option",
            f"gamma={gamma} with draft={name} needs a draft model, and the bundle has none",
            ('Use gamma=0, or draft="ngram"' if on_host else "Use gamma=0")
            + ", or build the bundle with DRAFT=<draft>.",
        )
    for source, what, how in (
        ("tables", "table", "python -m export.ngram writes it"),
        ("corpus", "corpus", "corpus=FILE, --corpus FILE"),
    ):
        if source in kind.needs and on_host:
            return OutriderError(
                "option",
                f"draft={name} needs a {what}, and none was given",
                f"Load the bundle with one ({how}), or use draft=ngram.",
            )
    return OutriderError(
        "option",
        f"draft={name} is only for the CPU in this version",
        "Use gamma=0, or a bundle that was built with DRAFT=<draft>.",
    )
