"""Calls of an engine for sequences in slots, and a sequence's part in the sampling: what drafting
and verification on the host have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .backends.engine import Engine, Ids, Logits
from .sampling.sampler import SlotSampling
from .sequence import ActiveSequence, Request


def prefill(engine: Engine, slot: int, tokens: Sequence[int], start: int) -> Logits:
    """Compute rows start.. of `tokens` in chunks; the logits [V] after the last one."""
    for begin in range(start, len(tokens), engine.chunk):
        ids = readable(engine, tokens[begin : begin + engine.chunk])[None]
        last = np.array([ids.shape[1] - 1])
        logits = engine.forward(wide(engine, ids), np.array([begin]), last, first_slot=slot)
    row: Logits = logits[0, 0]
    return row


def with_source(engine: Engine, slot: int, request: Request) -> Request:
    """The slot gets the request's source; and the request the second token of its prompt, where it
    is to be found (`Request.second`)."""
    engine.encode(slot, request.source)
    if not request.second:
        return request
    first, _, *others = request.prompt
    row, ids = prefill(engine, slot, [first], 0), np.array(sorted(request.second))
    best = int(ids[row[ids].argmax()])
    return replace(request, prompt=[first, best, *others], second=())


def wide(engine: Engine, ids: Ids) -> Ids:
    """[B, N] with N at least what the engine's bits need: tokens 0 behind, whose rows lie beyond
    the valid ones."""
    lacking = engine.narrowest - ids.shape[1]
    return np.pad(ids, ((0, 0), (0, lacking))) if lacking > 0 else ids


def readable(engine: Engine, tokens: Sequence[int]) -> Ids:
    """Ids that the engine can look up: a narrower draft reads the target's extra tokens as 0.

    That costs acceptance, never exactness: q is what the draft said, whatever it was fed.
    """
    ids = np.array(tokens, np.int64)
    ids[ids >= engine.vocab_size] = 0
    return ids


def span(batch: Iterable[ActiveSequence]) -> tuple[int, int]:
    """The run of consecutive slots [first, last) that holds all of these sequences."""
    indices = [sequence.slot.index for sequence in batch]
    return min(indices), max(indices) + 1


def idle_positions(engine: Engine, lengths: Sequence[int], width: int) -> Ids:
    """Where slots that sit out a call of `width` tokens may be written: beyond their valid rows,
    of which they have `lengths`."""
    # A text of the full length that is over was longer than a call may begin at.
    return np.minimum(np.array(lengths, np.int64), engine.capacity - width)


def feed(
    engine: Engine,
    lengths: Sequence[int],
    within: tuple[int, int],
    fed: Mapping[ActiveSequence, tuple[int, Sequence[int] | Ids]],
    since: int = 0,
    buffer: int = 0,
) -> Logits:
    """One call for the slots `within` [first, last): logits [S, K, V] after the tokens from number
    `since` on.

    lengths: the engine's valid rows of all slots. fed: the row that a sequence's first token goes
    to, and its tokens; the widest, or `Engine.narrowest`, is the call's width.
    """
    (first, last), most = within, max(len(tokens) for _, tokens in fed.values())
    ids = wide(engine, np.zeros((last - first, most), np.int64))
    position = idle_positions(engine, lengths[first:last], ids.shape[1])
    for sequence, (start, tokens) in fed.items():
        row = sequence.slot.index - first
        ids[row, : len(tokens)], position[row] = tokens, start
    return engine.forward(ids, position, np.arange(since, most), first_slot=first, buffer=buffer)


def early(sequence: ActiveSequence) -> int:
    """How many of the next tokens may not end the text."""
    return max(0, sequence.request.min_new_tokens - len(sequence.output))


def first_forbidden(
    sequence: ActiveSequence, tokens: Sequence[int], vocab_size: int, after: int = 0
) -> int:
    """Where the first token stands that the sampling cannot give; how many there are if none.

    after: drafts before them.
    """
    masked, ends = early(sequence) - after, sequence.request.eos_token_ids
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size or (i < masked and token in ends):
            return i
    return len(tokens)


def slot_sampling(
    sequence: ActiveSequence, gamma: int, drafts: Sequence[int] = (), seed: int | None = None
) -> SlotSampling:
    """A sequence's part in a round's sampling.

    drafts: tokens of the round that were decided before. seed: for a round within the round, whose
    rule is the token rule.
    """
    request, tokens = sequence.request, sequence.slot.tokens
    params, masked = request.params, early(sequence) - len(drafts)
    if seed is not None:
        params = replace(params, seed=seed, verify="token", lenience=1.0)
    return SlotSampling(
        params,
        gamma,
        position=len(tokens) + len(drafts),
        index=sequence.slot.index,
        context=np.array([*tokens, *drafts], np.int64)
        if params.reads_context or request.processors
        else None,
        suppress=np.array(sorted(request.eos_token_ids), np.int64) if masked > 0 else None,
        suppress_rows=max(0, min(masked, gamma + 1)),
        output_start=len(request.prompt),
        processors=request.processors,
    )
