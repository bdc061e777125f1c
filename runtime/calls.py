"""Engine calls for sequences in slots, and a sequence's part in the sampling, as shared by drafting
and verification on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .backends.engine import Engine, Ids, Logits, Source
from .sampling.sampler import SlotSampling
from .sequence import ActiveSequence, Request
from .slots import MIN_COPIED_ROWS, SlotTable


def prefill(engine: Engine, slot: int, tokens: Sequence[int], start: int) -> Logits:
    """Compute rows start.. of `tokens` in chunks; returns the logits [V] after the last token."""
    for begin in range(start, len(tokens), engine.chunk):
        ids = np.array([replace_unknown_ids(engine, tokens[begin : begin + engine.chunk])])
        last = np.array([ids.shape[1] - 1])
        logits = engine.forward(
            pad_to_narrowest(engine, ids), np.array([begin]), last, first_slot=slot
        )
    row: Logits = logits[0, 0]
    return row


def copy_prefix(engine: Engine, slot: int, tokens: Sequence[int], held: int, source: Source) -> int:
    """Copy the rows of `tokens` from the slot that holds most of them, if this one holds fewer.
    Returns how many it then holds. held: how many it holds now."""
    rows = engine.cached_rows
    if rows.states or not hasattr(engine, "copy_rows"):  # `HostEngine`s have it
        return held
    common = {i: rows.common_prefix(i, tokens, source) for i in range(engine.slots) if i != slot}
    other = max(common, key=common.__getitem__, default=slot)
    count = common.get(other, 0)
    if count < held + MIN_COPIED_ROWS:
        return held
    if count == len(tokens) - 1:  # a call of one token may round differently from wider ones
        count -= 1
    engine.copy_rows(other, slot, count)
    return count


def copy_prompt(target: Engine, slots: SlotTable, sequence: ActiveSequence) -> int:
    """Copy rows of the sequence's prompt, which another slot may even be computing, if slots can be
    copied. The last two tokens are left to compute, see `SlotTable.acquire`. Returns how many rows
    the slot holds."""
    slot, stats = sequence.slot, sequence.stats
    # A chunk that was interrupted may have overwritten the rows that this one would start from.
    held = target.cached_rows.resume_position(slot.index, slot.target_len)
    stats.reused_tokens = min(stats.reused_tokens, held)
    slot.target_len = held
    if slots.copies:
        source = sequence.request.source
        slot.target_len = copy_prefix(target, slot.index, slot.tokens[:-2], held, source)
        stats.reused_tokens += slot.target_len - held
    return slot.target_len


def encode_source(engine: Engine, slot: int, request: Request) -> Request:
    """Encode the request's source into the slot; returns the request with the second token of its
    prompt filled in if the model is to choose it (`Request.second_token_candidates`)."""
    engine.encode(slot, request.source)
    if not request.second_token_candidates:
        return request
    first, _, *others = request.prompt
    row, ids = prefill(engine, slot, [first], 0), np.array(sorted(request.second_token_candidates))
    best = int(ids[row[ids].argmax()])
    return replace(request, prompt=[first, best, *others], second_token_candidates=())


def pad_to_narrowest(engine: Engine, ids: Ids) -> Ids:
    """ids [B, N], padded with token 0 to the width that the engine needs for reproducible results.
    The rows of the padding lie beyond the valid ones."""
    padding = engine.min_width - ids.shape[1]
    return np.pad(ids, ((0, 0), (0, padding))) if padding > 0 else ids


def replace_unknown_ids(engine: Engine, tokens: Sequence[int]) -> list[int]:
    """Ids that the engine can look up: a draft with a smaller vocabulary reads the target's extra
    tokens as 0.

    That costs acceptance, never exactness: q is what the draft computed, whatever it read.
    """
    vocab_size = engine.vocab_size
    return [token if token < vocab_size else 0 for token in tokens]


def slot_range(batch: Iterable[ActiveSequence]) -> tuple[int, int]:
    """The run of consecutive slots [first, last) that holds all of these sequences."""
    indices = [sequence.slot.index for sequence in batch]
    return min(indices), max(indices) + 1


def idle_positions(engine: Engine, lengths: Sequence[int], width: int) -> list[int]:
    """Where a call of `width` tokens may write in slots that sit it out: beyond their valid rows,
    whose number is `lengths`."""
    # The rows of a finished text may reach past the last position where a call may start.
    return [min(length, engine.capacity - width) for length in lengths]


def forward_slots(
    engine: Engine,
    lengths: Sequence[int],
    bounds: tuple[int, int],
    inputs: Mapping[ActiveSequence, tuple[int, Sequence[int]]],
    logits_from: int = 0,
    buffer: int = 0,
) -> Logits:
    """Make one call for the slots `bounds` [first, last); returns logits [S, K, V] after the
    tokens from number `logits_from` on.

    lengths: the number of valid rows of every slot. inputs: for each sequence, the row of its first
    token, and its tokens. The call is as wide as the most tokens, and at least
    `Engine.min_width`.
    """
    (first, last), most = bounds, max(len(tokens) for _, tokens in inputs.values())
    width = max(most, engine.min_width)
    # Lists at first: between two engine calls, each NumPy call takes microseconds.
    ids = [[0] * width for _ in range(first, last)]
    position = idle_positions(engine, lengths[first:last], width)
    for sequence, (start, tokens) in inputs.items():
        row = sequence.slot.index - first
        ids[row][: len(tokens)], position[row] = tokens, start
    index = np.arange(logits_from, most)
    return engine.forward(np.array(ids), np.array(position), index, first, buffer)


def min_new_tokens_left(sequence: ActiveSequence) -> int:
    """How many of the next tokens must not end the text."""
    return max(0, sequence.request.min_new_tokens - len(sequence.output))


def first_forbidden(
    sequence: ActiveSequence, tokens: Sequence[int], vocab_size: int, drafts_before: int = 0
) -> int:
    """The index of the first token that sampling cannot produce; the number of tokens if there is
    none.

    drafts_before: number of drafts before these tokens.
    """
    masked, ends = min_new_tokens_left(sequence) - drafts_before, sequence.request.eos_token_ids
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size or (i < masked and token in ends):
            return i
    return len(tokens)


def slot_sampling(
    sequence: ActiveSequence, gamma: int, drafts: Sequence[int] = (), seed: int | None = None
) -> SlotSampling:
    """A sequence's part in a round's sampling.

    drafts: tokens of the round that are already decided. seed: for an inner round (`ChainDraft`),
    which uses the token rule.
    """
    request, tokens = sequence.request, sequence.slot.tokens
    params, masked = request.params, min_new_tokens_left(sequence) - len(drafts)
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
