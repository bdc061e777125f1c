"""Beam search from text to text: the counterpart of `TextEngine.generate` for beam search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..calls import encode_source
from ..files.errors import INTEGER, OutriderError, check_value
from ..text.engine import TextEngine
from ..text.options import Options, Prompt
from ..text.tokenizer import Detokenizer
from .search import BeamStats, beam_search

SLOTS_PER_BEAM = 4  # enough for twice as many `draft_beams`, with two drafted branches each


@dataclass(frozen=True)
class BeamText:
    """One of the texts that were found.

    token_ids: including the end-of-text, if there is one. score: the sum of the tokens'
    log-probabilities under the target. finished: whether the text reached an end-of-text.
    """

    text: str
    token_ids: list[int]
    score: float
    finished: bool


@dataclass(frozen=True)
class BeamTexts:
    """texts: at most `beams`, best first by score / length ** length_penalty."""

    texts: list[BeamText]
    prompt_tokens: int
    stats: BeamStats

    def lines(self, beams: int, gamma: int) -> list[str]:
        stats, best = self.stats, self.texts[0]
        speed = stats.steps / stats.elapsed if stats.elapsed else 0.0
        return [
            f"prompt {self.prompt_tokens} tok | output {len(best.token_ids)} tok | {speed:.1f} "
            f"tok/s | finish {'eos' if best.finished else 'length'} | score {best.score:.3f}",
            f"beams {beams} | rounds {stats.rounds} | tau {stats.mean_acceptance_length:.2f} | "
            f"accepted {stats.accepted}/{stats.drafted} drafted steps | gamma {gamma}",
        ]

    def json_object(self) -> dict[str, Any]:
        return {"hypotheses": [asdict(text) for text in self.texts], "stats": asdict(self.stats)}


def beam_texts(
    engine: TextEngine,
    prompt: Prompt | None,
    *,
    beams: int = 4,
    draft_beams: int | None = None,
    gamma: int = 0,
    max_new_tokens: int = 256,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
    chat: bool | None = None,
    system: str | None = None,
    special_tokens: Literal["control", "text"] = "control",
    source: str | Sequence[int] | npt.NDArray[np.float32] | None = None,
) -> BeamTexts:
    """The best texts that beam search finds; see `search.beam_search`.

    gamma: steps that the draft's own beam search runs ahead, 0 for plain beam search, whose result
    is the same and which is faster on a CPU. For the other arguments see `Options`. All slots must
    be free; with a few times `beams` slots the search is faster. Raises OutriderError: "option",
    "prompt", "busy", "numeric".
    """
    decoder = engine.decoder
    check_value("gamma", gamma, INTEGER)
    if gamma and decoder.draft is None:
        reason = "was opened without its own" if engine.manifest.pair.draft else "has none"
        cause = f"gamma={gamma} needs a draft model, and the bundle {reason}"
        raise OutriderError("option", cause, "Use gamma=0.")
    if draft_beams is not None and gamma == 0:
        cause = f"draft_beams={draft_beams} has no effect without drafts (gamma=0)"
        raise OutriderError("option", cause, "Leave draft_beams out, or set gamma.")
    options = Options(
        gamma=gamma, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, chat=chat,
        system=system, special_tokens=special_tokens, source=source,
    )  # fmt: skip
    request = engine.request(prompt, options)
    with engine.exclusive_access():
        request = encode_source(decoder.target, 0, request)
        ids = request.prompt
        result = beam_search(
            decoder.target, decoder.draft, ids, width=beams, draft_width=draft_beams, gamma=gamma,
            max_new_tokens=request.max_new_tokens, max_len=decoder.max_len,
            eos_token_ids=() if ignore_eos else request.eos_token_ids,
            length_penalty=length_penalty, draft_max_len=decoder.draft_max_len,
            vocab_size=decoder.vocab_size, source=request.source,
            processors=request.processors, min_new_tokens=request.min_new_tokens,
        )  # fmt: skip
    texts = [
        BeamText(_text(engine, ids, one.tokens[: -1 if one.finished else None]), list(one.tokens),
                 one.score, one.finished)
        for one in result.hypotheses
    ]  # fmt: skip
    return BeamTexts(texts, len(ids), result.stats)


def _text(engine: TextEngine, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    detokenizer = Detokenizer(engine.tokenizer, prompt)
    return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()


def unsupported_option(options: Options, requested: Mapping[str, Any]) -> str | None:
    """The name of the first changed option that has no meaning for beam search, or None.

    requested: other requested features, by name.
    """
    supported = {
        "max_new_tokens", "gamma", "draft", "ignore_eos", "chat", "system", "special_tokens",
        "source",
    }  # fmt: skip
    defaults = Options()
    for name, value in vars(options).items():
        if name not in supported and value != getattr(defaults, name) and value != []:
            return name
    if isinstance(options.gamma, str):
        return "gamma"
    if options.draft not in (None, "none", "model"):
        return "draft"
    return next((name for name, is_requested in requested.items() if is_requested), None)
