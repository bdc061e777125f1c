"""`Options`: how a request is to be generated."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..drafts.registry import KINDS
from ..files.errors import (
    FLAG,
    INTEGER,
    NUMBER,
    STRING,
    Kind,
    OutriderError,
    ValueRule,
    check_value,
    is_text,
    is_whole,
    one_of,
    own_number,
    refuse_first,
    shown_value,
)
from ..sampling.processors import LogitsProcessor
from ..sampling.warp import SamplingParams, VerifyRule

# Options that have no effect if nothing is drafted.
DRAFT_ONLY_OPTIONS = ("verify", "lenience", "fallback", "draft_temperature", "draft_threshold")
GammaName = Literal["auto", "transformers"]
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Options:
    """How to generate: what `generate`, `stream` and `batch` take, whole or as keyword arguments.

    Fields not described here are those of `SamplingParams`.

    max_new_tokens: most tokens of the output.
    min_new_tokens, no_repeat_ngram_size, encoder_no_repeat_ngram_size, bad_words_ids: as in
        Transformers. None takes the value of the checkpoint's generation config; 0 or an empty
        list turns it off.
    seed: seed of the random numbers. None draws one, which the result reports. With a rule other
        than "coupled", a seed reproduces the text only for the same draft and gamma; if rounds
        depend on timing (gamma or fallback "auto"), it reproduces only the distribution.
    gamma: draft tokens per round, 0 for plain decoding. None is 4 if the draft is a model, 8
        otherwise. "auto" picks the fastest number from measured costs and acceptance,
        "transformers" follows the schedule of Transformers.
    fallback: "auto" decodes without drafts while they lose time.
    draft: where draft tokens come from. None is what the bundle was built with. "model": its draft
        model; "chain": the draft model, with lookups as its own draft; "ngram": what followed the
        same tokens earlier in prompt or output; "copy": the same, in the prompt only (both also
        search a source); "unigram", "bigram", "skip": the tables that the bundle was loaded with;
        "random": uniformly random tokens; "none": plain decoding.
    draft_temperature: sampling temperature of the draft; None for the target's.
    draft_threshold: a round stops drafting after a token to which the draft gave a probability
        below this.
    verify: the acceptance rule. "coupled" draws what plain sampling with this seed draws, whatever
        was drafted; it also applies with gamma 0.
    stop: strings that end the output; they are not part of its text.
    stop_token_ids: the same, by token id. ignore_eos: continue after end-of-text.
    logprobs: number of alternatives reported for each token; None for no log-probabilities.
    chat: whether a plain-text prompt is passed to the chat template as a user message. None does
        so if there is a template. system: the system message in that case.
    special_tokens: whether special tokens that are spelled out in a prompt or message, such as
        "</s>", are "control" tokens, as in Transformers, or "text". Those that the chat template
        writes are always control tokens.
    source: input of an encoder-decoder's encoder, as text or token ids, or for a model that
        transcribes as log-mel features, float32 [bands, frames]. The prompt is then optional and
        begins the output.
    processors: functions that forbid tokens depending on the text before them
        (`sampling.processors`); from Python only.
    """

    max_new_tokens: int = 256
    min_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    seed: int | None = None
    gamma: int | GammaName | None = None
    fallback: Literal["auto", "off"] = "off"
    draft: str | None = None
    draft_temperature: float | None = None
    draft_threshold: float = 0.0
    verify: VerifyRule = "token"
    lenience: float = 1.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    chat: bool | None = None
    system: str | None = None
    special_tokens: Literal["control", "text"] = "control"
    source: str | Sequence[int] | npt.NDArray[np.float32] | None = None
    processors: Sequence[LogitsProcessor] = ()

    def seeded(self) -> Options:
        """The same options with a seed, drawn at random if there is none, and with Python's own
        numbers."""
        own = {name: own_number(value) for name, value in vars(self).items()}
        if self.seed is None:
            own["seed"] = int.from_bytes(os.urandom(4))
        return replace(self, **own)

    def updated(self, given: Mapping[str, Any]) -> Options:
        """A copy with the fields of a JSON object, whose keys are strings. Raises OutriderError
        "option", also for an unknown name."""
        if unknown := unknown_option(given, without="processors"):
            raise OutriderError("option", *unknown)
        changed = replace(self, **given)
        if isinstance(bias := changed.logit_bias, Mapping):
            ids = {_as_id(key): value for key, value in bias.items()}
            if len(ids) < len(bias):  # such as "5" and "05"
                raise OutriderError("option", "logit_bias names an id twice", "Name it once.")
            changed = replace(changed, logit_bias=ids)
        changed.check()
        return changed

    def sampling(self) -> SamplingParams:
        """The `SamplingParams` among these options. Raises OutriderError "option"."""
        names = {f.name for f in fields(Options)} & {f.name for f in fields(SamplingParams)}
        return SamplingParams(**{n: getattr(self, n) for n in names} | {"seed": self.seed or 0})

    def plain(self) -> Options:
        """The same options for plain decoding."""
        defaults = {name: getattr(Options, name) for name in self._draft_only_options_in_use()}
        return replace(self, gamma=0, draft=None, **defaults)

    def check(self) -> None:
        """Refuse what no bundle can honour. Raises OutriderError "option"."""
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is not None or getattr(Options, name) is not None:
                check_value(name, value, *rule)
        self.sampling()
        drafted = self.draft not in (None, "none")
        refuse_first([
            (drafted and self.draft not in tuple(KINDS),
             f"draft={shown_value(self.draft)} is unknown",
             f"Use {', '.join(KINDS)} or none."),
            ((self.min_new_tokens or 0) > self.max_new_tokens,
             f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}",
             "Choose 0 <= min_new_tokens <= max_new_tokens."),
            (self.chat is False and self.system is not None,
             "a system message needs the chat template",
             "Put it into the prompt itself, or use the chat template."),
            ((drafted and self.gamma == 0) or (self.draft == "none" and self.gamma),
             f"draft={self.draft} contradicts gamma={self.gamma}", "Leave one of them out."),
        ])  # fmt: skip
        if self.gamma == 0 or self.draft == "none":
            self.check_plain()

    def check_plain(self) -> None:
        """Refuse options that affect only drafts. Raises OutriderError "option"."""
        refuse_first(
            (True, f"{name}={getattr(self, name)} has no effect in plain decoding (gamma=0)",
             f"Leave {name} out, or use a draft.")
            for name in self._draft_only_options_in_use()
        )  # fmt: skip

    def _draft_only_options_in_use(self) -> list[str]:
        """The options in use that only affect drafts. The coupled rule also affects plain
        decoding."""
        return [
            name
            for name in DRAFT_ONLY_OPTIONS
            if getattr(self, name) not in (getattr(Options, name), "coupled")
        ]


def unknown_option(
    given: Iterable[str], others: Iterable[str] = (), *, without: str = ""
) -> tuple[str, str] | None:
    """Cause and remedy for the first name that is neither a field of `Options`, except one, nor
    among others; None if there is none."""
    known = [*(field.name for field in fields(Options) if field.name != without), *others]
    for name in given:
        if name not in known:
            nearest = get_close_matches(str(name), known, 1)
            remedy = f"Use {nearest[0]}" if nearest else f"Use one of {', '.join(known)}"
            return f"there is no option {name!r}", f"{remedy}, or leave it out."
    return None


def _is_list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return (
        isinstance(value, Collection)
        and not isinstance(value, str | bytes | Mapping)
        and getattr(value, "ndim", 1) > 0  # an array without axes cannot be iterated
        and all(map(fits, value))
    )


def _as_id(key: Any) -> Any:
    """The key of a JSON object as a token id; itself if it is none, or far too long for one."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key


def _is_id(value: Any) -> bool:
    return is_whole(value) and int(value) >= 0


def _is_ids(value: Any) -> bool:
    return _is_list_of(value, _is_id)


_BAD_WORDS: Kind = (lambda value: _is_list_of(value, _is_ids), "a list of lists of token ids")
_GAMMA: Kind = (
    lambda value: is_whole(value) or (is_text(value) and value in get_args(GammaName)),
    "an integer, auto or transformers",
)
_STOP: Kind = (
    lambda value: is_text(value) or _is_list_of(value, is_text),
    "a string or a list of strings",
)
_SOURCE: Kind = (
    lambda value: isinstance(value, str | np.ndarray) or _is_ids(value),
    "a string, a list of token ids or an array of features",
)
_FROM_0: ValueRule = (INTEGER, lambda value: value >= 0, "0 or more")
# Fields that `SamplingParams` does not check. None is legal where it is the default.
_RULES: dict[str, ValueRule] = {
    "max_new_tokens": (INTEGER, lambda value: value >= 1, "1 or more"),
    "min_new_tokens": _FROM_0,
    "no_repeat_ngram_size": _FROM_0,
    "encoder_no_repeat_ngram_size": _FROM_0,
    "bad_words_ids": (_BAD_WORDS, lambda words: all(map(len, words)), "lists that are not empty"),
    "seed": _FROM_0,
    "gamma": (_GAMMA, lambda value: isinstance(value, str) or value >= 0, "0 or more"),
    "fallback": (one_of("auto", "off"),),
    "draft": (STRING,),
    "draft_temperature": (NUMBER,),
    "draft_threshold": (NUMBER,),
    "stop": (
        _STOP,
        lambda value: "" not in ([value] if is_text(value) else [*value]),
        "strings that are not empty",
    ),
    "stop_token_ids": ((_is_ids, "a list of token ids"),),
    "ignore_eos": (FLAG,),
    "logprobs": _FROM_0,
    "chat": (FLAG,),
    "system": (STRING,),
    "special_tokens": (one_of("control", "text"),),
    "source": (_SOURCE,),
    "processors": ((lambda value: _is_list_of(value, callable), "a list of functions"),),
}
