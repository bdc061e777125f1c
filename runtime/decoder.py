"""Requests in slots: admitted, advanced round by round, released.

This module is independent of tokenizers, files and backends: it takes an object that runs rounds
(`sequence.Rounds`) and token ids, and owns the sequences. `round.speculate` shows a round.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Sequence

from .backends.engine import Logits, source_ids
from .checks import Limits, check_request
from .drafts.registry import KINDS
from .files.errors import OutriderError
from .gamma.costs import Costs
from .gamma.measured import MeasuredPolicy, Policy, SharedGamma
from .gamma.policy import choose_together
from .sampling.softmax import largest, log_softmax
from .sequence import (
    ActiveSequence,
    Origin,
    Request,
    RoundResult,
    Rounds,
    SlotPlan,
    SlotResult,
    Token,
)


class Decoder:
    """Sequences in slots, advanced together one round at a time.

    vocab_size: number of tokens; logits beyond it are padding. A draft with fewer tokens never
    proposes the others.
    max_len: longest prompt + output. draft_max_len: the length of the draft's own context; a
    sequence that reaches it continues without drafts. context: the largest max_len that the target
    could have been built for, None if unknown.
    """

    def __init__(
        self,
        rounds: Rounds,
        *,
        vocab_size: int,
        max_len: int,
        max_gamma: int,
        draft_max_len: int | None = None,
        context: int | None = None,
    ):
        self.rounds, self.slots = rounds, rounds.slots
        self.target, self.draft = rounds.target, rounds.draft
        self.vocab_size, self.max_len, self.max_gamma = vocab_size, max_len, max_gamma
        self.draft_max_len = max_len if draft_max_len is None else draft_max_len
        self.context = context
        self._gammas: dict[str, SharedGamma] = {}
        self._turns = itertools.count()

    # Joining and leaving

    def check(self, request: Request) -> None:
        """Refuse what cannot be run, before a slot is taken. Raises "prompt" or "option"."""
        check_request(
            request,
            Limits(
                self.vocab_size, self.target.vocab_size, self.max_len, self.max_gamma,
                self.rounds.kinds, self.draft is not None, self.rounds.on_host, self.context,
            ),
        )  # fmt: skip

    def admit(self, request: Request) -> ActiveSequence:
        """`begin`, and let the target read the whole prompt at once. Raises what ends the
        sequence."""
        begin, sequence = time.perf_counter(), self.begin(request)
        try:
            while sequence.is_reading:
                self._read_prompts([sequence])
            sequence.stats.ttft = sequence.stats.elapsed = time.perf_counter() - begin
            if sequence.error is not None:
                raise sequence.error
        except BaseException:
            self.release(sequence)
            raise
        return sequence

    def begin(self, request: Request) -> ActiveSequence:
        """Take a slot. The target reads the prompt in the sequence's first rounds, the last of
        which emits the first token, drawn from p alone. Raises what `check` raises, and "busy"."""
        self.check(request)
        self._take_slot(sequence := ActiveSequence(request))
        return sequence

    def _take_slot(self, sequence: ActiveSequence) -> None:
        request, turn = sequence.request, next(self._turns)
        known = request.prompt[:1] if request.second_token_candidates else request.prompt
        slot = self.slots.acquire(known, request.source)
        try:
            slot.tokens.extend(request.prompt)
            sequence.stats.reused_tokens, sequence.turn = slot.target_len, turn
            sequence.slot = slot
        except BaseException:  # an interrupt
            self.slots.release(slot)
            raise

    def release(self, sequence: ActiveSequence) -> None:
        """Free the slot. Its rows stay, for a later text that begins the same way."""
        if not sequence.has_slot:
            return
        try:
            self.rounds.forget(sequence)
        finally:
            self.slots.release(sequence.slot)

    def shared_gamma(self, draft: str) -> SharedGamma:
        """What policies share; for each draft, because a lookup costs less than a model."""
        if draft not in self._gammas:
            made = SharedGamma(Costs(self.max_gamma, KINDS[draft].reads_model))
            self._gammas.setdefault(draft, made)  # another thread may have been first
        return self._gammas[draft]

    # The round

    def round(self, batch: Collection[ActiveSequence]) -> None:
        """Run one round for all given unfinished sequences, which extends their `output`. Those
        whose prompt a model has yet to read may have to wait: see `_read_prompts`, `_read_ahead`.
        Those without a slot take one; `check` must have passed their requests.

        A sequence whose prompt cannot be read, or whose logits are broken, ends with
        `finish_reason` "error" and its `error`, and must be released. The others are not affected.
        """
        begin = time.perf_counter()
        batch = list(batch)
        for sequence in batch:
            if not sequence.has_slot:
                with sequence.ended_by_errors():
                    self._take_slot(sequence)
        running = [sequence for sequence in batch if sequence.output]
        self._read_prompts([sequence for sequence in batch if sequence.is_reading])
        prompts_read_at = time.perf_counter()
        waiting = self._read_ahead(running)
        read_at = time.perf_counter()
        ready = [sequence for sequence in running if sequence not in waiting]
        if ready:
            self._run(ready)
        end = time.perf_counter()
        # Those that wait take no part in what `_run` measures; the others waited for the chunk.
        for sequence in running if waiting else ():
            read_or_ran_at = end if sequence in waiting else read_at
            sequence.stats.time_draft_prefill += read_or_ran_at - prompts_read_at
        for sequence in batch:
            stats = sequence.stats
            # Not wall time since the start, which would include a slow reader of the stream.
            stats.elapsed += end - (begin if sequence.asked_at is None else sequence.asked_at)
            sequence.asked_at = None
            if sequence.output and not stats.ttft:
                stats.ttft = stats.elapsed

    def _read_prompts(self, reading: Collection[ActiveSequence]) -> None:
        """Let the target read prompts in turns: a chunk of one, or several that are together no
        longer than a chunk. The rounds of other sequences wait for no more than that. With the last
        chunk of a prompt, emit its first token."""
        left = chunk = self.target.chunk
        for sequence in sorted(reading, key=lambda sequence: sequence.turn):
            with sequence.ended_by_errors():
                unread = self.rounds.prepare_prompt(sequence)
                if unread > left < chunk:
                    break
                left -= unread
                if (part := self.rounds.read_prompt(sequence)) is not None:
                    self._commit(sequence, part)
            sequence.turn = next(self._turns)

    def _read_ahead(self, batch: Collection[ActiveSequence]) -> list[ActiveSequence]:
        """Let the draft model read one chunk of the oldest of the sequences of which it lacks more.
        Returns these sequences, which wait for it while the others' rounds go on. Not those with a
        policy: it may choose not to draft."""
        if self.draft is None:
            return []
        far = [
            sequence
            for sequence in batch
            if sequence.slot.draft_unread > self.draft.chunk
            and sequence.request.policy is None
            and self._reads_model(self._plan(sequence))
        ]
        if not far:
            return []
        oldest, waits = min(far, key=lambda sequence: sequence.started), True
        with oldest.ended_by_errors():
            waits = self.rounds.read_ahead(oldest)
        return far if waits else []

    def _run(self, batch: Collection[ActiveSequence]) -> None:
        begin = time.perf_counter()
        self._choose_gammas(batch)
        plans = [self._plan(sequence) for sequence in batch]
        planned_at = time.perf_counter()
        unread = sum(plan.sequence.slot.draft_unread for plan in plans if self._reads_model(plan))
        result = self.rounds.run(plans)
        ran_at = time.perf_counter()
        for sequence, part in zip(batch, result.parts, strict=True):
            self._commit(sequence, part)
        end = time.perf_counter()
        self._record_costs(result, plans, unread, end - planned_at)
        for sequence in batch:
            stats = sequence.stats
            stats.time_verify += result.time_verify
            stats.time_sample += result.time_sample + (end - ran_at)
            stats.time_draft += result.time_draft
            stats.time_draft_prefill += result.time_draft_prefill
            stats.time_rounds += end - begin - result.time_draft_prefill

    def _choose_gammas(self, batch: Collection[ActiveSequence]) -> None:
        """Let policies choose together, separately for each kind of draft."""
        policies, fixed = defaultdict[str, list[Policy]](list), defaultdict[str, int](int)
        for sequence in batch:
            request = sequence.request
            if request.policy is None:
                fixed[request.draft] = max(fixed[request.draft], request.gamma)
                continue
            policies[request.draft].append(request.policy)
            if isinstance(request.policy, MeasuredPolicy):
                request.policy.room = self._max_drafts(sequence)
        for draft, some in policies.items():
            choose_together(some, len(batch), fixed[draft])

    def _plan(self, sequence: ActiveSequence) -> SlotPlan:
        request = sequence.request
        gamma = request.gamma if request.policy is None else request.policy.next()
        return SlotPlan(sequence, gamma, self._max_drafts(sequence), self._tokens_left(sequence))

    def _reads_model(self, plan: SlotPlan) -> bool:
        kind = KINDS[plan.sequence.request.draft]
        return kind.reads_model and plan.drafts > 0

    def _record_costs(
        self, result: RoundResult, plans: Sequence[SlotPlan], unread: int, seconds: float
    ) -> None:
        """Record the cost of a round, for policies.

        unread: tokens that the draft had to read first. seconds: the round without the choice of
        gamma, which only some rounds make: it would make rarely used gammas look expensive.
        """
        if any(part.error for part in result.parts):
            return  # the sequences were run again one by one
        requests = [plan.sequence.request for plan in plans]
        if all(request.policy is None for request in requests):
            return
        steps: dict[str, int] = {}
        for request, part in zip(requests, result.parts, strict=True):
            if request.gamma:
                steps[request.draft] = max(steps.get(request.draft, 0), len(part.drafts))
        models = [draft for draft in steps if KINDS[draft].reads_model]
        rest = seconds - result.time_draft - result.time_draft_prefill
        for draft, count in steps.items():
            costs = self.shared_gamma(draft).costs
            # Beside a model, the other kinds take hardly any time.
            spent = result.time_draft if draft in models or not models else 0.0
            costs.observe(len(plans), count, spent, rest)
            if draft in models and result.time_draft_prefill and unread:
                costs.observe_catch_up(len(plans), unread, result.time_draft_prefill)

    def _tokens_left(self, sequence: ActiveSequence) -> int:
        """How many more tokens the text can have."""
        return min(
            sequence.request.max_new_tokens - len(sequence.output),
            self.max_len - len(sequence.slot.tokens),
        )

    def _max_drafts(self, sequence: ActiveSequence) -> int:
        """The most tokens to draft: those that can still become text and fit into the contexts."""
        if not KINDS[sequence.request.draft].reads_model:
            return max(0, self._tokens_left(sequence) - 1)
        if self.draft is None or len(source_ids(sequence.request.source)) > self.draft_max_len:
            return 0
        room = self.draft_max_len - len(sequence.slot.tokens)
        return max(0, min(self._tokens_left(sequence) - 1, room))

    def _commit(self, sequence: ActiveSequence, part: SlotResult) -> None:
        """Commit the tokens of a round that become text."""
        if part.error is not None:
            sequence.fail(part.error)
            return
        try:
            self._add_tokens(sequence, part)
        except BaseException:  # an interrupt, perhaps in a thread that owns another text
            self._fail_if_incomplete(sequence)
            raise

    def _add_tokens(self, sequence: ActiveSequence, part: SlotResult) -> None:
        drafts, verdict = part.drafts, part.verdict
        gamma = len(drafts)
        ids = [*drafts[: verdict.accepted], verdict.token]
        last_origin = "bonus" if verdict.accepted == gamma else "corrected"
        if gamma == 0:
            last_origin = "plain" if sequence.output else "first"
        origins = ["accepted"] * verdict.accepted + [last_origin]
        rows = part.rows() if sequence.request.logprobs is not None else None
        before = len(sequence.output)
        for i, (token, origin) in enumerate(zip(ids, origins, strict=True)):
            row = rows[i] if rows is not None else None
            sequence.output.append(self._token(sequence.request, token, origin, row))
            sequence.finish_reason = self._finish_reason(sequence, token)
            if sequence.finish_reason is not None:
                break
        emitted = len(sequence.output) - before
        slot = sequence.slot
        slot.commit(ids, gamma if KINDS[sequence.request.draft].reads_model else 0)
        slot.roll_back(len(slot.tokens) - (len(ids) - emitted))
        stats = sequence.stats
        stats.output_tokens = len(sequence.output)
        if last_origin != "first":
            kept = min(verdict.accepted, emitted)
            examined = min(len(verdict.ratios), emitted)
            stats.count_round(gamma, kept, examined, emitted, is_complete=emitted == len(ids))
            if (policy := sequence.request.policy) is not None:
                policy.observe(gamma, len(verdict.ratios), verdict.accepted)

    @staticmethod
    def _fail_if_incomplete(sequence: ActiveSequence) -> None:
        """Fail a sequence to which a round was only partly added."""
        if len(sequence.slot.tokens) != len(sequence.request.prompt) + len(sequence.output):
            cause = "an interrupt came while the tokens of a round were added to the text"
            sequence.fail(OutriderError("busy", cause, "Repeat the request"))

    def _finish_reason(self, sequence: ActiveSequence, token: int) -> str | None:
        request = sequence.request
        if not request.ignore_eos and token in request.eos_token_ids:
            return "eos"
        if request.stop is not None and (reason := request.stop(token)) is not None:
            return reason
        if len(sequence.output) == request.max_new_tokens:
            return "length"
        # Counted from prompt and output, because the slot commits only after the whole round.
        if len(request.prompt) + len(sequence.output) == self.max_len:
            return "context"
        return None

    def _token(self, request: Request, token: int, origin: Origin, row: Logits | None) -> Token:
        if row is None:
            return Token(token, origin)
        logprobs = log_softmax(row[: self.vocab_size])
        best = largest(logprobs, request.logprobs or 0)
        alternatives = tuple((int(i), float(logprobs[i])) for i in best)
        return Token(token, origin, float(logprobs[token]), alternatives)
