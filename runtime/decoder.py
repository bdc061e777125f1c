"""The round: draft, verify, accept or correct or extend, commit.

Algorithm 1 of Leviathan et al. 2023 on cache slots. This module knows nothing of tokenizers, files
or backends: it takes what runs a round (`rounds.Rounds`) and token ids, and owns the texts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import get_args

import numpy as np

from .backends.engine import Engine, Logits
from .costs import Costs
from .files.errors import OutriderError
from .round import RoundResult, Rounds, SlotPlan, SlotResult
from .sequence import LOOKUPS, MODELS, TABLES, ActiveSequence, DraftKind, Origin, Request, Token


class Decoder:
    """Sequences in slots, advanced together one round at a time.

    vocab_size: how many tokens there are; logits beyond are padding. A narrower draft proposes
    none of the others.
    max_len: longest prompt + output. draft_max_len: where the draft's own context ends; a
    sequence that reaches it goes on without drafts.
    """

    def __init__(
        self,
        rounds: Rounds,
        *,
        vocab_size: int,
        max_len: int,
        max_gamma: int,
        draft_max_len: int | None = None,
    ):
        self.rounds, self.slots = rounds, rounds.slots
        self.vocab_size, self.max_len, self.max_gamma = vocab_size, max_len, max_gamma
        self.draft_max_len = max_len if draft_max_len is None else draft_max_len
        # What policies choose by; a lookup costs other than a model.
        self.costs: dict[DraftKind, Costs] = {
            kind: Costs(max_gamma) for kind in get_args(DraftKind)
        }

    @property
    def target(self) -> Engine:
        return self.rounds.target

    @property
    def draft(self) -> Engine | None:
        return self.rounds.draft

    # Joining and leaving

    def check(self, request: Request) -> None:
        """Refuse what cannot be run, before a slot is taken. Raises "prompt" or "option"."""
        length = len(request.prompt)
        if length == 0:
            raise OutriderError("prompt", "the prompt is empty", "Give it at least one token.")
        if length >= self.max_len:
            raise OutriderError(
                "prompt",
                f"the prompt has {length:,} tokens and the bundle's context {self.max_len:,}",
                f"Shorten it, or build the bundle with MAX_LEN={length + request.max_new_tokens}.",
            )
        self.check_ids(request.prompt)
        if request.max_new_tokens < 1 or not 0 <= request.min_new_tokens <= request.max_new_tokens:
            raise OutriderError(
                "option",
                f"min_new_tokens={request.min_new_tokens}, "
                f"max_new_tokens={request.max_new_tokens} contradict each other",
                "Choose 0 <= min_new_tokens <= max_new_tokens, with max_new_tokens at least 1.",
            )
        self._check_draft(request)
        if not 0 <= request.gamma <= self.max_gamma:
            raise OutriderError(
                "option",
                f"gamma={request.gamma} is over the {self.max_gamma} that the bundle was built for"
                if request.gamma > 0
                else f"gamma={request.gamma} is negative",
                f"Choose gamma from 0 to {self.max_gamma}, or build with MAX_GAMMA.",
            )
        width = self.vocab_size
        if request.logprobs is not None and not 0 <= request.logprobs <= width:
            raise OutriderError(
                "option",
                f"logprobs={request.logprobs} is out of range",
                f"Choose from 0 to {width}, the number of tokens that there are.",
            )

    def _check_draft(self, request: Request) -> None:
        """Whether who is to propose is here, and can what is asked of it."""
        kind, tempered = request.draft, request.draft_temperature is not None
        stops = request.draft_threshold > 0
        if request.gamma and kind not in self.rounds.kinds:
            raise _absent(
                kind, request.gamma, self.draft is not None, self.rounds.supports_draft_options
            )
        rules: list[tuple[object, str, str]] = [
            (kind in LOOKUPS and request.params.verify == "sigmoid",
             "verify=sigmoid needs the draft's logits, and a lookup has none",
             "Use verify=token, or the draft model."),
            ((tempered or stops) and not self.rounds.supports_draft_options,
             "draft_temperature and draft_threshold are for the CPU in this version",
             "Leave them out."),
            (tempered and request.params.temperature == 0,
             "draft_temperature has no effect at temperature=0",
             "Leave it out, or sample with temperature above 0."),
            (tempered and not 1e-3 <= (request.draft_temperature or 0) <= 1e3,
             f"draft_temperature={request.draft_temperature} is out of range",
             "It must be from 0.001 to 1000."),
            (not 0 <= request.draft_threshold < 1,
             f"draft_threshold={request.draft_threshold} is out of range",
             "It must be 0 (off) or a probability below 1."),
            ((tempered or stops) and kind in LOOKUPS,
             f"draft={kind} has no probabilities for a temperature or threshold",
             "Leave them out, or use the draft model."),
            (stops and kind == "chain", "draft=chain always drafts gamma tokens",
             "Leave draft_threshold out, or use draft=model."),
            (stops and request.policy is not None,
             "draft_threshold and a gamma that is chosen for each round are two ways to stop early",
             "Use one of them."),
        ]  # fmt: skip
        for broken, cause, remedy in rules:
            if broken and request.gamma:
                raise OutriderError("option", cause, remedy)

    def check_ids(self, prompt: Sequence[int]) -> None:
        """Refuse ids that the target has no embedding for. Raises "prompt"."""
        width = self.target.vocab_size
        odd = next((token for token in prompt if not 0 <= token < width), None)
        if odd is not None:
            raise OutriderError(
                "prompt",
                f"the prompt has the token id {odd}, and the model only 0 to {width - 1}",
                "Leave that token out of the prompt or the chat template.",
            )

    def admit(self, request: Request) -> ActiveSequence:
        """Take a slot, prefill the target, emit the first token (it comes from p alone)."""
        self.check(request)
        sequence = ActiveSequence(request, self.slots.acquire())
        try:
            sequence.slot.tokens.extend(request.prompt)
            self._settle(sequence, self.rounds.start(sequence))
            stats = sequence.stats
            stats.ttft = stats.elapsed = time.perf_counter() - sequence.started
        except BaseException:
            self.release(sequence)
            raise
        return sequence

    def release(self, sequence: ActiveSequence) -> None:
        """Give the slot back; its rows become garbage for the next owner to overwrite."""
        try:
            self.rounds.forget(sequence)
        finally:
            self.slots.release(sequence.slot)

    # The round

    def round(self, batch: Collection[ActiveSequence]) -> dict[ActiveSequence, list[Token]]:
        """One round for all given unfinished sequences; the new tokens of each."""
        begin = time.perf_counter()
        turns = [
            SlotPlan(
                sequence, self._gamma(sequence, batch), self._limit(sequence), self._left(sequence)
            )
            for sequence in batch
        ]
        chosen = time.perf_counter()
        behind = [self._behind(turn) for turn in turns]
        outcome = self.rounds.run(turns)
        after = time.perf_counter()
        emitted = {
            sequence: self._settle(sequence, part)
            for sequence, part in zip(batch, outcome.parts, strict=True)
        }
        end = time.perf_counter()
        self._observe(outcome, turns, sum(behind), end - chosen)
        for sequence in batch:
            stats = sequence.stats
            stats.time_verify += outcome.time_verify
            stats.time_sample += outcome.time_sample + (end - after)
            stats.time_draft += outcome.time_draft
            stats.time_draft_prefill += outcome.time_draft_prefill
            stats.time_rounds += end - begin - outcome.time_draft_prefill
            # Not wall time since the start: a slow reader of a stream is not a slow decoder.
            stats.elapsed += end - begin
        return emitted

    def _gamma(self, sequence: ActiveSequence, batch: Collection[ActiveSequence]) -> int:
        policy = sequence.request.policy
        return sequence.request.gamma if policy is None else policy.next(len(batch))

    def _behind(self, turn: SlotPlan) -> int:
        """How many tokens the draft has to read before it drafts: of the prompt, or of rounds that
        went without it."""
        slot = turn.sequence.slot
        drafts = min(turn.gamma, turn.limit) and turn.sequence.request.draft in MODELS
        return max(0, len(slot.tokens) - 2 - slot.draft_len) if drafts else 0

    def _observe(
        self, outcome: RoundResult, turns: Sequence[SlotPlan], behind: int, seconds: float
    ) -> None:
        """Tell what a round cost to those that choose by it. seconds: all of it but the choosing,
        which comes before some rounds only: a gamma that is seldom tried would look dear."""
        kinds = {turn.sequence.request.draft for turn in turns}
        if not any(turn.sequence.request.policy for turn in turns) or len(kinds) > 1:
            return  # of a round with both, neither's cost is known
        costs, caught_up = self.costs[kinds.pop()], outcome.time_draft_prefill
        steps = max(len(part.drafts) for part in outcome.parts)
        rest = seconds - outcome.time_draft - caught_up
        costs.observe(len(turns), steps, outcome.time_draft, rest)
        if caught_up and behind:
            costs.caught_up(len(turns), behind, caught_up)

    def _left(self, sequence: ActiveSequence) -> int:
        """How many tokens the text can still have."""
        return min(
            sequence.request.max_new_tokens - len(sequence.output),
            self.max_len - len(sequence.slot.tokens),
        )

    def _limit(self, sequence: ActiveSequence) -> int:
        """How many tokens to draft at most: what can still become text and fits the contexts."""
        if sequence.request.draft not in MODELS:
            return max(0, self._left(sequence) - 1)
        if self.draft is None:
            return 0
        return max(0, min(self._left(sequence) - 1, self.draft_max_len - len(sequence.slot.tokens)))

    def _settle(self, sequence: ActiveSequence, part: SlotResult) -> list[Token]:
        """Commit what becomes text of a round."""
        drafts, verdict = part.drafts, part.verdict
        gamma = len(drafts)
        ids = [*drafts[: verdict.accepted], verdict.token]
        last = "bonus" if verdict.accepted == gamma else "corrected"
        if gamma == 0:
            last = "plain" if sequence.output else "first"
        origins = ["accepted"] * verdict.accepted + [last]
        rows = part.rows() if sequence.request.logprobs is not None else None
        emitted = []
        for i, (token, origin) in enumerate(zip(ids, origins, strict=True)):
            row = rows[i] if rows is not None else None
            emitted.append(self._token(sequence.request, token, origin, row))
            sequence.output.append(emitted[-1])
            sequence.finish_reason = self._finish_reason(sequence, token)
            if sequence.finish_reason is not None:
                break
        slot = sequence.slot
        slot.commit(ids, gamma if sequence.request.draft in MODELS else 0)
        slot.roll_back(len(slot.tokens) - (len(ids) - len(emitted)))
        stats = sequence.stats
        stats.output_tokens = len(sequence.output)
        if last != "first":
            kept = min(verdict.accepted, len(emitted))
            examined = min(len(verdict.ratios), len(emitted))
            whole = len(emitted) == len(ids)
            stats.count_round(gamma, kept, examined, len(emitted), whole=whole)
            if sequence.request.policy is not None:
                accepted = verdict.accepted
                sequence.request.policy.observe(
                    gamma, len(verdict.ratios), accepted, gamma > 0 and accepted == gamma
                )
        return emitted

    def _finish_reason(self, sequence: ActiveSequence, token: int) -> str | None:
        request = sequence.request
        if not request.ignore_eos and token in request.eos_token_ids:
            return "eos"
        if request.stop is not None and (reason := request.stop(token)) is not None:
            return reason
        if len(sequence.output) == request.max_new_tokens:
            return "length"
        # The prompt and every token emitted so far: the slot commits only after the block.
        if len(request.prompt) + len(sequence.output) == self.max_len:
            return "context"
        return None

    def _token(self, request: Request, token: int, origin: Origin, row: Logits | None) -> Token:
        if row is None:
            return Token(token, origin)
        logits = row[: self.vocab_size].astype(np.float64)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-logprobs, kind="stable")[: request.logprobs]
        alternatives = tuple((int(i), float(logprobs[i])) for i in best)
        return Token(token, origin, float(logprobs[token]), alternatives)


def _absent(kind: DraftKind, gamma: int, drafts: bool, on_host: bool) -> OutriderError:
    """Why this kind of draft is not there, and how to get it. drafts: whether a model is."""
    if kind in MODELS and not drafts:
        return OutriderError(
            "option",
            f"gamma={gamma} needs a draft, and the bundle has none",
            ('Use gamma=0, or draft="ngram"' if on_host else "Use gamma=0")
            + ", or build the bundle with DRAFT=<draft>.",
        )
    if kind in TABLES and on_host:
        return OutriderError(
            "option",
            f"draft={kind} needs a table, and none was given",
            "Load the bundle with one (python -m export.ngram writes it), or use draft=ngram.",
        )
    return OutriderError(
        "option",
        f"draft={kind} is for the CPU in this version",
        "Use gamma=0, or a bundle that was built with DRAFT=<draft>.",
    )
