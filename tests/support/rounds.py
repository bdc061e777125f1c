"""Decoders on fake engines, an oracle that has no rounds, and invariants to check after a round."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import device_standin
import numpy as np
import pytest
from fakes import VOCAB_SIZE, CopyingFake, Model

from runtime.decoder import Decoder
from runtime.drafts.tables import Tables
from runtime.round import HostRounds
from runtime.sampling import kernel
from runtime.sampling.distribution import Distribution
from runtime.sampling.native import RoundSampler
from runtime.sampling.philox import Purpose
from runtime.sampling.reference import NumpySampler
from runtime.sampling.rules import Verdict, verify
from runtime.sampling.sampler import Sampler
from runtime.sequence import ActiveSequence, Request, Rounds

SAMPLER = "numpy"  # set by the fixture `sampler`

all_samplers = pytest.mark.parametrize("sampler", ["numpy", "kernel", "device"], indirect=True)
# Also for tests that choose the uniforms: a GPU makes its own, and test_kernel_cuda.py compares its
# kernels with the CPU's on the same numbers.
on_host = pytest.mark.parametrize("sampler", ["numpy", "kernel"], indirect=True)


def cases(fast: Iterable[Any], everything: Iterable[Any]) -> list[Any]:
    """Parameters of a test: all of `everything`, with those not in `fast` marked slow."""
    fast = list(fast)
    rest = [case if isinstance(case, tuple) else (case,) for case in everything if case not in fast]
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


class KernelWithUniforms(RoundSampler):
    """The kernel with uniforms from `reference.uniform`, so that a test can choose them."""

    def _table(self, width: int, cells: list[tuple[int, Purpose]]) -> np.ndarray:
        """[B, width]: one column for each (step, purpose)."""
        table = np.zeros((len(self._samplings), width))
        for b, place in enumerate(self._samplings):
            for column, (step, purpose) in enumerate(cells):
                # Steps that a slot does not have must not draw uniforms either.
                if step < max(place.gamma, purpose == Purpose.RESIDUAL):
                    table[b, column] = NumpySampler._uniform(None, place, step, purpose)
        return table

    def draw(self, logits, step, uniforms=None, first_slot=0):
        table = np.zeros((len(self._samplings), self.width))
        table[:, step] = self._table(1, [(step, Purpose.DRAFT)])[:, 0]
        return super().draw(logits, step, table, first_slot)

    def verify(self, logits, draft_logits=None, uniforms=None, first_slot=0):
        cells = [(i, Purpose.ACCEPT) for i in range(self.width)] + [(0, Purpose.RESIDUAL)]
        table = self._table(self.width + 1, cells)
        return super().verify(logits, draft_logits, table, first_slot)


def make_sampler(vocab_size: int, draft_vocab_size: int, slots: int, max_gamma: int) -> Sampler:
    if SAMPLER == "numpy":
        return NumpySampler(vocab_size)
    if cause := kernel.unavailable_reason():
        pytest.skip(cause)
    return KernelWithUniforms(vocab_size, max_gamma, slots, 1, draft_vocab_size)


def make_decoder(
    target: Model,
    draft: Model | None = None,
    *,
    vocab_size: int = VOCAB_SIZE,
    target_width: int | None = None,
    draft_width: int | None = None,
    slots: int = 1,
    max_len: int = 64,
    max_gamma: int = 8,
    capacity: int | None = None,
    draft_max_len: int | None = None,
    draft_capacity: int | None = None,
    order: int | None = None,
    tables: Tables | None = None,
    **of_target: Any,
) -> Decoder:
    """A decoder on fake engines of exactly a bundle's capacity: one row too many is an error.

    of_target: more options of the target's `CopyingFake`.
    """
    capacity = capacity or max_len + max_gamma + 1
    target_engine = CopyingFake(
        target, vocab_size=target_width or vocab_size, slots=slots, capacity=capacity, order=order,
        **of_target,
    )  # fmt: skip
    other = None if draft is None else CopyingFake(
        draft, vocab_size=draft_width or vocab_size, slots=slots,
        capacity=draft_capacity or capacity, order=order,
    )  # fmt: skip
    rounds: Rounds
    if SAMPLER == "device":
        rounds = device_standin.make_rounds(
            target_engine, other, vocab_size=vocab_size, max_len=max_len, max_gamma=max_gamma,
            draft_max_len=draft_max_len,
        )  # fmt: skip
    else:
        width = min(vocab_size, draft_width or vocab_size)
        rounds = HostRounds(
            target_engine, other, make_sampler(vocab_size, width, slots, max_gamma),
            make_sampler(width, width, slots, max_gamma) if other else None, tables,
        )  # fmt: skip
    return Decoder(
        rounds,
        vocab_size=vocab_size,
        max_len=max_len,
        max_gamma=max_gamma,
        draft_max_len=draft_max_len,
    )


def check_rows(decoder: Decoder, sequence: ActiveSequence) -> None:
    """Check that the cache lengths match the tokens, and that the valid rows of both caches hold
    them."""
    slot = sequence.slot
    assert slot.tokens == [*sequence.request.prompt, *ids(sequence)]
    assert sequence.is_reading or slot.target_len == len(slot.tokens) - 1
    assert slot.draft_len <= len(slot.tokens) - 1
    for engine, length in ((decoder.target, slot.target_len), (decoder.draft, slot.draft_len)):
        if engine is not None:
            text = [token if token < engine.vocab_size else 0 for token in slot.tokens[:length]]
            assert engine.cache[slot.index, :length].tolist() == text


def ids(sequence: ActiveSequence) -> list[int]:
    return [token.id for token in sequence.output]


def outcome(sequence: ActiveSequence) -> list[tuple[int, float | None]]:
    """Ids and log-probabilities of the output."""
    return [(token.id, token.logprob) for token in sequence.output]


def run(decoder: Decoder, request: Request) -> ActiveSequence:
    """Decode a whole request, checking the rows after every round, and release the slot."""
    sequence = decoder.admit(request)
    try:
        check_rows(decoder, sequence)
        while sequence.finish_reason is None:
            decoder.round([sequence])
            if sequence.error is not None:
                raise sequence.error
            check_rows(decoder, sequence)
    finally:
        decoder.release(sequence)
    return sequence


def finish(decoder: Decoder, *sequences: ActiveSequence) -> None:
    """Run rounds of the unfinished sequences until all have finished."""
    while unfinished := [sequence for sequence in sequences if sequence.finish_reason is None]:
        decoder.round(unfinished)


def run_all(decoder: Decoder, requests: Iterable[Request]) -> list[ActiveSequence]:
    """Like `run`, but for all requests at once, each in its own slot."""
    active = [decoder.admit(request) for request in requests]
    while unfinished := [sequence for sequence in active if sequence.finish_reason is None]:
        decoder.round(unfinished)
        for sequence in active:
            check_rows(decoder, sequence)
    for sequence in active:
        decoder.release(sequence)
    return active


def join_and_leave(
    decoder: Decoder, requests: Iterable[Request], chance: random.Random, changing: float = 0.0
) -> list[ActiveSequence]:
    """Decode sequences that join, skip rounds, and leave early or when they finish, at random;
    return them as they leave. changing: probability that a sequence changes its gamma before a
    round."""
    waiting = list(requests)
    present: list[ActiveSequence] = []
    done: list[ActiveSequence] = []

    def leave(sequence: ActiveSequence) -> None:
        present.remove(sequence)
        decoder.release(sequence)
        done.append(sequence)

    while waiting or present:
        while waiting and decoder.slots.free and chance.random() < 0.7:
            sequence = decoder.admit(waiting.pop(0))
            present.append(sequence)
            if sequence.finish_reason:
                leave(sequence)
        batch = [sequence for sequence in present if chance.random() < 0.8]
        for sequence in batch:
            if chance.random() < changing:
                sequence.request = replace(sequence.request, gamma=chance.choice([0, 2, 5]))
        if batch:
            decoder.round(batch)
        for sequence in [*present]:
            if sequence.finish_reason or chance.random() < 0.03:
                leave(sequence)
    return done


def plain(decoder: Decoder, request: Request) -> list[int]:
    """The output of the same request decoded one token per round."""
    return ids(run(decoder, replace(request, gamma=0)))


def oracle(model: Model, request: Request, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The target's own greedy output, by definition: no cache, no rounds, no `warp`."""
    text, output = list(request.prompt), []
    penalty = np.float32(request.params.repetition_penalty)
    while len(output) < request.max_new_tokens:
        row = model(tuple(text))[:vocab_size].tolist()
        for token in set(text):
            z = np.float32(row[token])
            row[token] = float(z * penalty if z < 0 else z / penalty)
        if len(output) < request.min_new_tokens:
            for token in request.eos_token_ids:
                row[token] = float("-inf")
        token = row.index(max(row))  # the lowest index on ties
        text.append(token)
        output.append(token)
        if token in request.eos_token_ids and not request.ignore_eos:
            break
    return output


# Faults of a round, for negative controls


@contextmanager
def broken(name: str, value: object) -> Iterator[None]:
    """Replace `runtime.<module>.<attribute>` within the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"runtime.{name}", value)
        yield


def accept_everything(p, q, drafts, accept_u, final_u, params):
    """A rule that never rejects."""
    verdict = verify(p, q, drafts, accept_u, final_u, params)
    gamma = len(drafts)
    return Verdict(gamma, p[gamma].draw(final_u), verdict.ratios)


def flattened_q(p, q, drafts, accept_u, final_u, params):
    """A rule given a q other than the one drawn from: flatter, as at another temperature."""
    flat = [Distribution.dense(np.sqrt(row.weights)) for row in q]
    return verify(p, flat, drafts, accept_u, final_u, params)


def corrected_from_p(p, q, drafts, accept_u, final_u, params):
    """A correction that comes from p instead of norm(max(0, p - q))."""
    verdict = verify(p, q, drafts, accept_u, final_u, params)
    return Verdict(verdict.accepted, p[verdict.accepted].draw(final_u), verdict.ratios)


WRONG_RULES = [accept_everything, flattened_q, corrected_from_p]


@contextmanager
def late_ends() -> Iterator[None]:
    """The end of a sequence is detected one token too late."""
    real = Decoder._finish_reason
    noticed: dict[ActiveSequence, str | None] = {}

    def finish(self: Decoder, sequence: ActiveSequence, token: int) -> str | None:
        late, noticed[sequence] = noticed.get(sequence), real(self, sequence, token)
        return late

    with broken("decoder.Decoder._finish_reason", finish):
        yield
