"""The round: draft, verify, accept or correct or extend, commit.

Algorithm 1 of Leviathan et al. 2023 on cache slots. This module knows nothing of tokenizers, files
or backends: it takes two engines (docs/architecture.md has the contract) and token ids.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .engine import Engine, Ids, Logits
from .errors import OutriderError
from .request import Origin, Request, Running, Token
from .sampler import Place, Sampler
from .sampling import Verdict
from .slots import SlotTable


class Decoder:
    """Sequences in slots, advanced together one round at a time.

    vocab_size: how many tokens there are; logits beyond are padding. A narrower draft proposes
    none of the others.
    max_len: longest prompt + output. draft_max_len: where the draft's own context ends; a
    sequence that reaches it goes on without drafts. sampler: for as many slots as the engines
    have, and max_gamma draft tokens.
    """

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_len: int,
        max_gamma: int,
        draft_max_len: int | None = None,
    ):
        self.target, self.draft, self.sampler = target, draft, sampler
        self.vocab_size, self.max_len, self.max_gamma = vocab_size, max_len, max_gamma
        self.draft_max_len = max_len if draft_max_len is None else draft_max_len
        self.slots = SlotTable(target.slots)

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
        if request.gamma and self.draft is None:
            raise OutriderError(
                "option",
                f"gamma={request.gamma} needs a draft, and the bundle has none",
                "Use gamma=0, or build the bundle with DRAFT=<draft>.",
            )
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

    def admit(self, request: Request) -> Running:
        """Take a slot, prefill the target, emit the first token (it comes from p alone)."""
        self.check(request)
        running = Running(request, self.slots.acquire())
        try:
            slot, stats = running.slot, running.stats
            slot.tokens.extend(request.prompt)
            logits = self._prefill(self.target, slot.index, slot.tokens, 0)
            stats.time_prefill = time.perf_counter() - running.started
            self.sampler.begin([self._place(running, 0)])
            rows = logits[None, None]
            (verdict,) = self.sampler.verify(rows, first_slot=running.slot.index)
            self._settle(running, [], verdict, rows[0])
            stats.ttft = stats.elapsed = time.perf_counter() - running.started
        except BaseException:
            self.release(running)
            raise
        return running

    def release(self, running: Running) -> None:
        """Give the slot back; its rows become garbage for the next owner to overwrite."""
        self.slots.release(running.slot)

    def _prefill(self, engine: Engine, slot: int, tokens: Sequence[int], start: int) -> Logits:
        """Compute rows start.. of `tokens` in chunks; the logits [V] after the last one."""
        for begin in range(start, len(tokens), engine.chunk):
            ids = self._ids(engine, tokens[begin : begin + engine.chunk])[None]
            last = np.array([ids.shape[1] - 1])
            logits = engine.forward(ids, np.array([begin]), last, first_slot=slot)
        row: Logits = logits[0, 0]
        return row

    def _ids(self, engine: Engine, tokens: Sequence[int]) -> Ids:
        """Ids that the engine can look up: a narrower draft reads the target's extra tokens as 0.

        That costs acceptance, never exactness: q is what the draft said, whatever it was fed.
        """
        ids = np.array(tokens, np.int64)
        ids[ids >= engine.vocab_size] = 0
        return ids

    # The round

    def round(self, batch: Collection[Running]) -> dict[Running, list[Token]]:
        """One round for all given unfinished sequences; the new tokens of each."""
        begin = time.perf_counter()
        gammas = {running: self._gamma(running) for running in batch}
        self.sampler.begin([self._place(running, gamma) for running, gamma in gammas.items()])
        drafted = self._draft(gammas)
        after_draft = time.perf_counter()
        first, logits = self._verify(gammas, drafted.tokens)
        after_verify = time.perf_counter()
        verdicts = self.sampler.verify(logits, drafted.logits or None, first_slot=first)
        emitted = {}
        for running, verdict in zip(gammas, verdicts, strict=True):
            rows = logits[running.slot.index - first]
            emitted[running] = self._settle(running, drafted.tokens[running], verdict, rows)
        end = time.perf_counter()
        for running in batch:
            stats = running.stats
            stats.time_verify += after_verify - after_draft
            stats.time_sample += end - after_verify + drafted.time_sample
            stats.time_draft += drafted.time_engine
            stats.time_draft_prefill += drafted.time_prefill
            stats.time_rounds += end - begin - drafted.time_prefill
            # Not wall time since the start: a slow reader of a stream is not a slow decoder.
            stats.elapsed += end - begin
        return emitted

    def _gamma(self, running: Running) -> int:
        """How many tokens to draft: no more than can still become text or fit a context."""
        request, length = running.request, len(running.slot.tokens)
        return max(
            0,
            min(
                request.gamma if self.draft is not None else 0,
                request.max_new_tokens - len(running.output) - 1,
                self.max_len - length - 1,
                self.draft_max_len - length,
            ),
        )

    def _place(self, running: Running, gamma: int) -> Place:
        request, tokens = running.request, running.slot.tokens
        early = max(0, request.min_new_tokens - len(running.output))
        penalised = request.params.repetition_penalty != 1
        return Place(
            request.params,
            gamma,
            position=len(tokens),
            index=running.slot.index,
            context=np.array(tokens, np.int64) if penalised else None,
            suppress=np.array(sorted(request.eos_token_ids), np.int64) if early else None,
            suppress_rows=min(early, gamma + 1),
            name=f"slot {running.slot.index}",
        )

    def _draft(self, gammas: dict[Running, int]) -> _Drafted:
        """Draw x1..x(gamma) of each sequence from q, one engine call a step for all of them."""
        drafted = _Drafted({running: [] for running in gammas})
        drafting = [running for running, gamma in gammas.items() if gamma]
        if not drafting:
            return drafted
        engine = self.draft
        assert engine is not None
        for running in drafting:
            self._catch_up(engine, running, drafted)
        first, last = _span(drafting)
        for step in range(max(gammas.values())):
            begin = time.perf_counter()
            # Two tokens first: after a fully accepted round the draft lacks a row (Slot.commit).
            width = 1 if step else 2
            ids = np.zeros((last - first, width), np.int64)
            position = self._idle_positions(first, last, "draft_len")
            for running in drafting:
                tokens, drafts = running.slot.tokens, drafted.tokens[running]
                row, length = running.slot.index - first, len(tokens)
                # Past its own gamma a sequence repeats its last draft: the row is never committed.
                ids[row] = self._ids(engine, drafts[-1:] if step else tokens[-2:])
                position[row] = length - 1 + len(drafts) if step else length - 2
            index = np.array([width - 1])
            logits = engine.forward(ids, position, index, first_slot=first, buffer=step)[:, 0]
            after = time.perf_counter()
            drafted.logits.append(logits)
            drawn = self.sampler.draw(logits, step, keep=False, first_slot=first).tolist()
            for (running, gamma), token in zip(gammas.items(), drawn, strict=True):
                if step < gamma:
                    drafted.tokens[running].append(token)
            drafted.time_engine += after - begin
            drafted.time_sample += time.perf_counter() - after
        return drafted

    def _catch_up(self, engine: Engine, running: Running, drafted: _Drafted) -> None:
        """Give the draft the rows it lacks: the prompt at first, plain rounds later."""
        slot = running.slot
        need = len(slot.tokens) - 2  # the first draft step feeds the last two itself
        if slot.draft_len < need:
            begin = time.perf_counter()
            self._prefill(engine, slot.index, slot.tokens[:need], slot.draft_len)
            slot.draft_len = need
            drafted.time_prefill += time.perf_counter() - begin

    def _verify(
        self, gammas: dict[Running, int], drafts: dict[Running, list[int]]
    ) -> tuple[int, Logits]:
        """One target call over [pending, x1..x(gamma)]: logits [B, gamma+1, V] of slots first.."""
        first, last = _span(gammas)
        width = max(gammas.values()) + 1
        ids = np.zeros((last - first, width), np.int64)
        position = self._idle_positions(first, last, "target_len")
        for running in gammas:
            row = running.slot.index - first
            feed = [running.slot.pending, *drafts[running]]
            ids[row, : len(feed)] = feed
            position[row] = running.slot.target_len
        return first, self.target.forward(ids, position, np.arange(width), first_slot=first)

    def _idle_positions(self, first: int, last: int, length: str) -> Ids:
        """Where slots that sit out a call may be written: beyond their valid rows."""
        slots = (self.slots[index] for index in range(first, last))
        return np.array([getattr(slot, length) if slot else 0 for slot in slots], np.int64)

    def _settle(
        self, running: Running, drafts: list[int], verdict: Verdict, rows: Logits
    ) -> list[Token]:
        """Commit what becomes text of a verdict. rows: the target's raw logits [K, V]."""
        gamma = len(drafts)
        ids = [*drafts[: verdict.accepted], verdict.token]
        last = "bonus" if verdict.accepted == gamma else "corrected"
        if gamma == 0:
            last = "plain" if running.output else "first"
        origins = ["accepted"] * verdict.accepted + [last]
        emitted = []
        for i, (token, origin) in enumerate(zip(ids, origins, strict=True)):
            emitted.append(self._token(running.request, token, origin, rows[i]))
            running.output.append(emitted[-1])
            running.finish_reason = self._finish_reason(running, token)
            if running.finish_reason is not None:
                break
        slot = running.slot
        slot.commit(ids, gamma)
        slot.roll_back(len(slot.tokens) - (len(ids) - len(emitted)))
        stats = running.stats
        stats.output_tokens = len(running.output)
        if last != "first":
            kept = min(verdict.accepted, len(emitted))
            examined = min(len(verdict.ratios), len(emitted))
            whole = len(emitted) == len(ids)
            stats.count_round(gamma, kept, examined, len(emitted), whole=whole)
        return emitted

    def _finish_reason(self, running: Running, token: int) -> str | None:
        request = running.request
        if not request.ignore_eos and token in request.eos_token_ids:
            return "eos"
        if request.stop is not None and (reason := request.stop(token)) is not None:
            return reason
        if len(running.output) == request.max_new_tokens:
            return "length"
        # The prompt and every token emitted so far: the slot commits only after the block.
        if len(request.prompt) + len(running.output) == self.max_len:
            return "context"
        return None

    def _token(self, request: Request, token: int, origin: Origin, row: Logits) -> Token:
        if request.logprobs is None:
            return Token(token, origin)
        logits = row[: self.vocab_size].astype(np.float64)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-logprobs, kind="stable")[: request.logprobs]
        alternatives = tuple((int(i), float(logprobs[i])) for i in best)
        return Token(token, origin, float(logprobs[token]), alternatives)


@dataclass(slots=True)
class _Drafted:
    """What a round drafted: tokens of each sequence; logits [S, V] of each step, in the engine's
    buffers. Seconds in engine steps, in drawing, and in rows that were missing before it."""

    tokens: dict[Running, list[int]]
    logits: list[Logits] = field(default_factory=list)
    time_engine: float = 0.0
    time_sample: float = 0.0
    time_prefill: float = 0.0


def _span(batch: Iterable[Running]) -> tuple[int, int]:
    """The run of consecutive slots [first, last) that holds all of these sequences."""
    indices = [running.slot.index for running in batch]
    return min(indices), max(indices) + 1
