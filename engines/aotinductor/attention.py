"""Attention as one kernel, in Triton: a step of decoding is bound by the number of its kernels.

Imported only where Triton is, because `triton.jit` and Inductor need the kernels at module level.

A program computes a tile of rows (tokens x the heads that share keys) for every n-th block of keys,
and keeps running softmax sums (FlashAttention, arXiv 2205.14135). With few tiles, several programs
share the blocks of one tile: the last of them to finish adds up what all have written (stream-K,
arXiv 2301.03598). Blocks that no token of a tile sees are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

PROGRAMS = 128  # that a tile is split for: about as many as a GPU of that size runs at once
MOST_SPLITS = tl.constexpr(32)
# Tiles are narrow up to as many rows, so that the last programs have little to add up.
NARROW, NARROW_ROWS, WIDE = tl.constexpr(16), tl.constexpr(128), tl.constexpr(64)
WIDEST = 256  # values of a key
BLOCK_BYTES = 16_384  # of keys: two blocks of keys and values fit into the memory of every SM
LOG2_E = 1.4426950408889634


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `attention` computes these shapes on the device. Its matrix products need compute
    capability 8.0."""
    return (
        max(key.shape[3], value.shape[3]) <= WIDEST
        and isinstance(key.shape[2], int)
        and query.dtype == key.dtype == value.dtype
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def spans(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the attentions with this mask, contiguous bool [B, 1, N, S], share: it; the first row
    that each token sees and the one after the last, int32 [B, N]; the counters, int32 [PROGRAMS].
    """
    rows = torch.arange(mask.shape[3], dtype=torch.int32, device=mask.device)
    seen = mask[:, 0]
    begin = torch.where(seen, rows, mask.shape[3]).amin(-1).to(torch.int32)
    end = torch.where(seen, rows + 1, 0).amax(-1).to(torch.int32)
    counters = torch.zeros(PROGRAMS, dtype=torch.int32, device=mask.device)
    # Inductor writes what it views in this way to memory once, not once for each attention. That
    # works only for what is computed, not for another view.
    return mask.as_strided(mask.shape, mask.stride()), begin, end, counters


def attend(
    query: torch.Tensor,  # [B, H, N, D]
    key: torch.Tensor,  # [B, Hkv, S, D]
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    mask: torch.Tensor,  # bool [B, 1, N, S]
    begin: torch.Tensor,  # see `spans`
    end: torch.Tensor,
    counters: torch.Tensor,  # int32 [PROGRAMS], all 0, as they also are afterwards
    scale: float,
) -> torch.Tensor:
    """[B, H, N, Dv]: softmax in float32; 0 for a token that sees nothing."""
    (batch, heads, count, width), (_, kv_heads, rows, value_width) = query.shape, value.shape
    # Tokens before heads, as the projections before and after have them.
    queries = query.transpose(1, 2).contiguous()
    out = query.new_empty(batch, count, heads, value_width)
    groups = heads // kv_heads
    widths = [max(16, triton.next_power_of_2(each)) for each in (width, value_width)]
    half = query.dtype.itemsize == 2
    block = min(64, max(16, BLOCK_BYTES // (max(widths) * query.dtype.itemsize)))
    tiles = (count * groups + NARROW.value - 1) // NARROW.value
    if half:
        wide_tiles = (count * groups + WIDE.value - 1) // WIDE.value
        tiles = torch.sym_min(tiles, torch.sym_max(NARROW_ROWS.value // NARROW.value, wide_tiles))
    most = min(MOST_SPLITS.value, triton.cdiv(rows, block))
    splits = torch.sym_max(1, torch.sym_min(most, PROGRAMS // (batch * kv_heads * tiles)))
    # Tiles are split only if there are at most PROGRAMS in all.
    parts = query.new_empty(PROGRAMS * WIDE.value * (value_width + 2), dtype=torch.float32)
    wrap_triton(_attention)[splits, tiles, batch * kv_heads](
        queries, key.contiguous(), value.contiguous(), mask.contiguous(), begin, end, counters,
        parts, out, count, scale * LOG2_E, heads, groups, rows, width, value_width, half, block,
        *widths, num_warps=4 if half and max(widths) <= 128 else 8, num_stages=2,
    )  # fmt: skip
    return out.transpose(1, 2)


attention = triton_op("outrider::attention", attend, mutates_args={"counters"})


@triton.jit
def _attention(
    queries, keys, values, mask, begin, end, counters, parts, out, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    if HALF and count * GROUPS > NARROW_ROWS:
        _tile(
            queries, keys, values, mask, begin, end, counters, parts, out, count,
            SCALE, HEADS, GROUPS, ROWS, WIDTH, VALUE_WIDTH, WIDE, BLOCK, KEY_COLUMNS, VALUE_COLUMNS,
        )  # fmt: skip
    else:
        _tile(
            queries, keys, values, mask, begin, end, counters, parts, out, count, SCALE,
            HEADS, GROUPS, ROWS, WIDTH, VALUE_WIDTH, NARROW, BLOCK, KEY_COLUMNS, VALUE_COLUMNS,
        )  # fmt: skip


@triton.jit
def _tile(
    queries, keys, values, mask, begin, end, counters, parts, out, count,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    split, splits = tl.program_id(0), tl.num_programs(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tokens, which see more, first
    pair = tl.program_id(2).to(tl.int64)
    row = tile * TILE + tl.arange(0, TILE)
    inside = row < count * GROUPS
    token = (pair // KV_HEADS) * count + row // GROUPS
    head = token * HEADS + (pair % KV_HEADS) * GROUPS + row % GROUPS
    key_column, value_column = tl.arange(0, KEY_COLUMNS), tl.arange(0, VALUE_COLUMNS)
    is_key, is_value = key_column < WIDTH, value_column < VALUE_WIDTH

    # Clamped, because Inductor tries the kernel out with arguments that are not spans.
    first = tl.maximum(tl.min(tl.load(begin + token, inside, other=ROWS)), 0) // BLOCK * BLOCK
    last = tl.minimum(tl.max(tl.load(end + token, inside, other=0)), ROWS)
    sharing = tl.minimum(tl.maximum(tl.cdiv(last - first, BLOCK), 1), splits)
    if split < sharing:
        query = tl.load(
            queries + head[:, None] * WIDTH + key_column[None, :],
            inside[:, None] & is_key[None, :],
            other=0,
        )
        most = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        result = tl.zeros([TILE, VALUE_COLUMNS], tl.float32)
        for at in range(first + split * BLOCK, last, sharing * BLOCK):
            cached = at + tl.arange(0, BLOCK)
            exists = cached < ROWS
            place = pair * ROWS + cached
            key = tl.load(
                keys + place[None, :] * WIDTH + key_column[:, None],
                exists[None, :] & is_key[:, None],
                other=0,
            )
            seen = tl.load(
                mask + token[:, None] * ROWS + cached[None, :],
                inside[:, None] & exists[None, :],
                other=0,
            )
            scores = tl.dot(query, key, input_precision="ieee") * SCALE
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0, higher)
            weights, fading = tl.exp2(scores - base[:, None]), tl.exp2(most - base)
            value = tl.load(
                values + place[:, None] * VALUE_WIDTH + value_column[None, :],
                exists[:, None] & is_value[None, :],
                other=0,
            )
            total = total * fading + tl.sum(weights, 1)
            result = result * fading[:, None]
            result = tl.dot(weights.to(value.dtype), value, result, input_precision="ieee")
            most = higher
        finished = sharing == 1
        if sharing > 1:
            # The number of a tile fits: only if there are few do programs share one.
            group = (pair * tl.num_programs(1) + tile).to(tl.int32)
            parts += group * splits * (TILE * (VALUE_WIDTH + 2))
            part = parts + split * (TILE * (VALUE_WIDTH + 2))
            within = tl.arange(0, TILE)
            tl.store(
                part + within[:, None] * VALUE_WIDTH + value_column[None, :],
                result,
                inside[:, None] & is_value[None, :],
            )
            tl.store(part + TILE * VALUE_WIDTH + within, most, inside)
            tl.store(part + TILE * (VALUE_WIDTH + 1) + within, total, inside)
            tl.debug_barrier()  # every thread has written before one of them counts
            finished = tl.atomic_add(counters + group, 1, sem="acq_rel") == sharing - 1
            if finished:
                tl.store(counters + group, 0)
                total, result = _sum(parts, sharing, inside, TILE, VALUE_WIDTH, VALUE_COLUMNS)
        if finished:
            result = result / tl.where(total == 0, 1, total)[:, None]
            tl.store(
                out + head[:, None] * VALUE_WIDTH + value_column[None, :],
                result.to(out.dtype.element_ty),
                inside[:, None] & is_value[None, :],
            )


@triton.jit
def _sum(
    parts, sharing, inside,
    TILE: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up what `sharing` programs wrote: the sums of their weights and of weighted values."""
    TOGETHER: tl.constexpr = max(1, min(MOST_SPLITS, 8192 // (TILE * VALUE_COLUMNS)))
    row, column = tl.arange(0, TILE), tl.arange(0, VALUE_COLUMNS)
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    result = tl.zeros([TILE, VALUE_COLUMNS], tl.float32)
    for at in range(0, sharing, TOGETHER):
        split = at + tl.arange(0, TOGETHER)
        exists = (split < sharing)[:, None] & inside[None, :]
        part = parts + split * (TILE * (VALUE_WIDTH + 2))
        edge = part[:, None] + TILE * VALUE_WIDTH + row[None, :]
        # Not from the first-level cache, which other programs do not write to.
        mosts = tl.load(edge, exists, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(edge + TILE, exists, other=0, cache_modifier=".cg")
        results = tl.load(
            part[:, None, None] + row[None, :, None] * VALUE_WIDTH + column[None, None, :],
            exists[:, :, None] & (column < VALUE_WIDTH)[None, None, :],
            other=0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(most, tl.max(mosts, 0))
        base = tl.where(higher == float("-inf"), 0, higher)
        weights, fading = tl.exp2(mosts - base[None, :]), tl.exp2(most - base)
        total = total * fading + tl.sum(weights * totals, 0)
        result = result * fading[:, None] + tl.sum(weights[:, :, None] * results, 0)
        most = higher
    return total, result
