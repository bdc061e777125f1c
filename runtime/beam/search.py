"""Beam search on the target, drafted by a wider beam of the draft: appendix A.4 of Leviathan,
Kalman, Matias 2023.

The draft runs gamma steps of its own beam search from the target's beam. The target then scores, in
one sweep, every sequence that was ever in the draft's beam, and its own beam search goes on for as
long as its beam is among them: the paper's top_w(M_p) within top_u(M_q). Each of these steps is
exactly a step of plain beam search, on the target's own logits, so the result is the same whatever
the draft proposes, up to the rounding of calls of other shapes, which can flip a near-tie, in half
precision now and then. If the draft is the target and both beams have the same width, the target
always follows it; in a wider draft beam, continuations of other hypotheses can crowd out those that
the narrower beam keeps.

`beam_search` knows nothing of tokenizers and files; `Pool` keeps the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.engine import Engine, Logits, Source
from ..files.errors import INTEGER, NUMBER, check_value
from ..files.graphs import GAMMA_LIMIT
from ..sampling.processors import LogitsProcessor
from ..sampling.softmax import largest, log_softmax
from ..sampling.warp import NO_TOKEN, broken_row_error, forbid_ids
from .pool import Pool, PoolStats, Tokens

NO_TOKEN_ADDED = -1  # in place of a token: the hypothesis stays as it is
Forbid = Callable[[npt.NDArray[Any], Tokens], None]  # sets scores of illegal next tokens to -inf
MAX_BEAMS = 1024  # a wider search would take forever


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """tokens: generated ids, including an end-of-text id at the end. score: the sum of their
    log-probabilities, without a length penalty. finished: whether the last id is an end-of-text."""

    tokens: Tokens
    score: float
    finished: bool = False


@dataclass(slots=True)
class BeamStats:
    """rounds: sweeps of the target. steps: of beam search, one token each. drafted: steps that the
    draft ran ahead. accepted: the drafted steps that the target's beam could follow, so that
    steps = rounds + accepted. scored: sequences after which the target computed logits. elapsed:
    seconds."""

    rounds: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    scored: int = 0
    elapsed: float = 0.0
    target: PoolStats = field(default_factory=PoolStats)
    draft: PoolStats = field(default_factory=PoolStats)

    @property
    def mean_acceptance_length(self) -> float:
        """tau: steps per round."""
        return self.steps / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class BeamResult:
    """hypotheses: at most `width`, best first by score / length ** length_penalty."""

    hypotheses: list[Hypothesis]
    stats: BeamStats


def beam_search(
    target: Engine,
    draft: Engine | None,
    prompt: Sequence[int],
    *,
    width: int,
    draft_width: int | None = None,
    gamma: int,
    max_new_tokens: int,
    max_len: int,
    eos_token_ids: Collection[int] = (),
    length_penalty: float = 1.0,
    draft_max_len: int | None = None,
    vocab_size: int | None = None,
    source: Source = (),
    processors: Sequence[LogitsProcessor] = (),
    min_new_tokens: int = 0,
) -> BeamResult:
    """The `width` best continuations that beam search finds.

    A step extends every unfinished hypothesis by every token; the next beam is the best `width` of
    these and of the finished ones, which stay as they are. The search ends when all are finished,
    or at max_new_tokens or max_len. Ties go to the better parent, then to the lower token id.
    Without end-of-text ids this is Transformers' `generate(num_beams=width, do_sample=False)`; with
    them Transformers differs: it keeps `width` unfinished hypotheses beside the finished ones.

    target, draft: engines that can copy rows (`Pool`). Slots are used from the first on, and their
    contents are lost; if there are fewer slots than sequences, the rest go into further calls.
    gamma: steps drafted per round, less than the target's largest K (`max_outputs`); 0, or no
    draft, is plain beam search. draft_width: width of the draft's beam, at least `width`; None
    for twice that. max_len: longest prompt + output. draft_max_len: the draft's own context length,
    beyond which nothing is drafted. vocab_size: number of tokens; logits beyond are padding, and a
    draft with fewer tokens proposes none of the others. length_penalty: affects the ranking of the
    result, not the search. source: what an encoder reads, if the models have one. processors:
    applied to the log-probabilities of a step, which are not normalised again, as in Transformers.
    min_new_tokens: number of tokens before an end-of-text may come.

    The prompt and max_new_tokens must be legal for `TextEngine.request`. Raises OutriderError:
    "option", "numeric", and what the engines raise.
    """
    start = time.perf_counter()
    vocab_size = target.vocab_size if vocab_size is None else vocab_size
    width, draft_width, gamma, length_penalty = _check_options(
        width, draft_width, gamma, length_penalty
    )
    stats = BeamStats()
    verifier = Pool(target, prompt, stats.target, "target", source)
    drafter = None
    if draft is not None and gamma:
        drafter = Pool(draft, prompt, stats.draft, "draft", source)
    end_ids = frozenset(eos_token_ids)
    max_steps = min(max_new_tokens, max_len - len(prompt))
    draft_room = (max_len if draft_max_len is None else draft_max_len) - len(prompt)

    def forbid(scores: npt.NDArray[Any], tokens: Tokens) -> None:
        if len(tokens) < min_new_tokens:
            forbid_ids(scores, [*end_ids])
        text = np.array([*prompt, *tokens], np.int64)
        for processor in processors:
            processor(scores, text, len(prompt))

    beam = [Hypothesis((), 0.0)]
    while stats.steps < max_steps and _unfinished(beam):
        # No logits are needed for the sequences that the last step of all makes.
        draft_steps = min(gamma, max_steps - stats.steps - 1, draft_room - stats.steps)
        nodes = _unfinished(beam)
        if drafter is not None and draft_steps > 0:
            draft_vocab_size = min(vocab_size, drafter.engine.vocab_size)
            drafts = beam
            for _ in range(draft_steps):
                logits = drafter.logits(_unfinished(drafts))
                drafts = advance_beam(
                    drafts, logits, draft_width, draft_vocab_size, end_ids, forbid
                )
                stats.drafted += 1
                nodes += _unfinished(drafts)
                if not _unfinished(drafts):
                    break
        known = verifier.logits(nodes)
        stats.rounds += 1
        stats.scored += len(nodes)
        previous_steps = stats.steps
        while stats.steps < max_steps and _unfinished(beam) and all_known(beam, known):
            beam = advance_beam(beam, known, width, vocab_size, end_ids, forbid)
            stats.steps += 1
        if not beam:
            raise broken_row_error(f"target, position {len(prompt) + stats.steps - 1}", NO_TOKEN)
        stats.accepted += stats.steps - previous_steps - 1
    # Sorting is stable: hypotheses with equal length-penalised scores stay in beam order.
    beam.sort(key=lambda one: -one.score / len(one.tokens) ** length_penalty)
    stats.elapsed = time.perf_counter() - start
    return BeamResult(beam, stats)


def advance_beam(
    beam: Sequence[Hypothesis],
    logits: Mapping[Tokens, Logits],
    width: int,
    vocab_size: int,
    end_ids: Collection[int],
    forbid: Forbid,
) -> list[Hypothesis]:
    """One step of beam search: at most `width` hypotheses, best first.

    logits: raw, float32 [V], after each unfinished hypothesis of the beam. Tokens from vocab_size
    on, and those of probability 0, are never chosen.
    """
    candidates: list[tuple[float, int, int]] = []  # sort in order of preference: see `beam_search`
    for rank, one in enumerate(beam):
        if one.finished:
            candidates.append((-one.score, rank, NO_TOKEN_ADDED))
            continue
        totals = log_softmax(logits[one.tokens][:vocab_size])
        forbid(totals, one.tokens)
        totals += one.score
        best = [token for token in largest(totals, width).tolist() if totals[token] > -np.inf]
        candidates += [(-float(totals[token]), rank, token) for token in best]
    candidates.sort()
    return [
        beam[rank]
        if token == NO_TOKEN_ADDED
        else Hypothesis((*beam[rank].tokens, token), -negated, token in end_ids)
        for negated, rank, token in candidates[:width]
    ]


def all_known(beam: Iterable[Hypothesis], known: Collection[Tokens]) -> bool:
    """Whether the logits after every unfinished hypothesis are known."""
    return all(tokens in known for tokens in _unfinished(beam))


def _unfinished(beam: Iterable[Hypothesis]) -> list[Tokens]:
    return [one.tokens for one in beam if not one.finished]


def _check_options(
    width: int, draft_width: int | None, gamma: int, length_penalty: float
) -> tuple[int, int, int, float]:
    """The same options, with the default width of the draft's beam."""

    def check(name: str, value: object, minimum: int, maximum: int) -> int:
        legal = range(minimum, maximum + 1).__contains__
        return int(check_value(name, value, INTEGER, legal, f"from {minimum} to {maximum}"))

    width = check("beams", width, 1, MAX_BEAMS)
    draft_width = 2 * width if draft_width is None else draft_width
    return (
        width,
        check("draft_beams", draft_width, width, 2 * MAX_BEAMS),
        check("gamma", gamma, 0, GAMMA_LIMIT),  # outside of beam search it may also be "auto"
        # Bounded, so that length ** penalty is finite and not 0.
        check_value("length_penalty", length_penalty, NUMBER, lambda x: abs(x) <= 10,
                    "from -10 to 10; 0 ranks by the score alone"),
    )  # fmt: skip
