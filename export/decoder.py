"""The traced decoder: any causal model of Transformers, with an explicit KV cache.

Transformers routes attention, masks, caches and experts through interfaces. This module registers
one implementation of each, so that every architecture that uses them becomes the graph of
docs/graph.md without code of its own:

- the cache writes N new rows at `position` and returns the whole slot;
- the mask is the architecture's own mask function, evaluated at the absolute positions of the
  queries, so sliding windows and chunks are handled correctly;
- attention is the standard operator over all S rows of the slot;
- the state that a layer carries from token to token (linear attention, state spaces, short
  convolutions) is kept in rows too, and updated by the functions of functions/recurrence.py;
- the experts of a layer are one batched product.

The decoder is an ordinary torch module, and can be run as it is. An ONNX export (export/graph.py)
records something else than torch executes in only two places, attention and the write to the cache:
ONNX has operators for these that torch's code would not be converted to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from .functions import attention as own_attention
from .functions import recurrence
from .functions.own import IMPLEMENTATION
from .functions.replaced import patched_layers
from .functions.stateful_layers import RecurrenceInputs, StateCache, UnsupportedArchitecture
from .weights.experts import experts

Shapes = Sequence[Sequence[int]]  # H and D of a row, per layer or state
# Tensors that attention layers pass along, which add nothing to the mask.
_IGNORED_TENSORS = {"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"}


# The attention layers that used the interface since the list was last cleared.
traced_layers: list[str] = []  # names only: a reference to a layer would keep its weights alive

# A pending write of the next attention's keys and values to the cache. Layers of multi-head latent
# attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) pass latents to their cache, and compute
# keys and values from everything that it returns: in each call, from all rows of the slot.
_pending_writes: list[
    Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
] = []


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, N, D]
    key: torch.Tensor,  # [B, Hkv, S, D], or only the new rows
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    attention_mask: torch.Tensor | None,  # bool [B, 1, N, S]; None in an encoder: no mask
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [H], attention sinks
    position_bias: torch.Tensor | None = None,  # [B or 1, H, N, S], added to the scores
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    traced_layers.append(type(module).__name__)
    if _pending_writes:
        key, value = _pending_writes.pop()(key, value)
    extras = [
        k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in _IGNORED_TENSORS
    ]
    if extras:
        raise UnsupportedArchitecture(f"its attention takes {', '.join(extras)}")
    if attention_mask is None and getattr(module, "is_causal", True):
        raise UnsupportedArchitecture("it makes its attention mask outside the mask interface")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if position_bias is not None:
        assert attention_mask is not None
        if softcap or s_aux is not None:
            raise UnsupportedArchitecture("its attention has a bias and a soft cap or sinks")
        lowest = torch.finfo(position_bias.dtype).min
        attention_mask = position_bias.masked_fill(~attention_mask, lowest)
    exporting, has_cap_or_sinks = torch.onnx.is_in_onnx_export(), bool(softcap) or s_aux is not None
    if has_cap_or_sinks and attention_mask is None:
        raise UnsupportedArchitecture("its attention has a soft cap or sinks, and no mask")
    has_uneven_widths = key.shape[-1] != value.shape[-1] and position_bias is None
    if exporting and attention_mask is not None and (has_cap_or_sinks or has_uneven_widths):
        # The operator has no sinks; TensorRT-RTX's parser refuses softcap and unequal widths.
        rows = query, key, value, attention_mask
        out = own_attention.attention_node(*rows, scaling, softcap, s_aux)
    elif has_cap_or_sinks:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        assert attention_mask is not None
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        if s_aux is not None:
            sink = s_aux.to(scores.dtype).reshape(1, -1, 1, 1)
            scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        out = weights[..., : value.shape[2]] @ value
    elif exporting:
        # Not torch.onnx.ops.attention, which assumes that values are as wide as keys.
        out = torch.onnx.ops.symbolic(
            "Attention",
            [query, key, value, *([] if attention_mask is None else [attention_mask])],
            {"scale": float(scaling)},
            dtype=query.dtype,
            shape=(*query.shape[:3], value.shape[3]),
            version=24,
        )
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
    out = out.transpose(1, 2)
    return out.contiguous() if exporting else out, None  # AFMoE's layers call `view` on it


def _mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: torch.Tensor | int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,  # bool [B, S]
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """The architecture's mask function at absolute positions: bool [B, 1, N, S].

    q_offset: `position` [B], as the slots of a call have different lengths. attention_mask: the
    valid rows of a source; None if the mask function alone decides.
    """
    start = torch.as_tensor(q_offset, device=device).reshape(-1, 1, 1, 1)
    queries = start + torch.arange(q_length, device=device)[:, None]
    rows = torch.arange(kv_length, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    mask = mask_function(zero, zero, queries, rows)
    return mask if attention_mask is None else mask & attention_mask[:, None, None]


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _mask)
ExpertsInterface.register(IMPLEMENTATION, experts)


class SlotCache(StateCache):
    """The slots as Transformers' `past_key_values`: new rows are scattered to `position`. If a
    layer passes rows of another size than the slot's (latents), the keys and values that its
    attention receives are written instead."""

    def __init__(
        self,
        keys: Sequence[torch.Tensor],  # per layer that has them [B, Hkv, S, D]
        values: Sequence[torch.Tensor],
        position: torch.Tensor,  # int64 [B]
        states: Sequence[torch.Tensor] = (),  # [B, H, R, D], in the order of the calls
    ):
        super().__init__()
        _pending_writes.clear()
        self.keys, self.values, self.position = list(keys), list(values), position
        self.states = list(states)
        self._layer_indices: dict[int, int] = {}  # index of each layer among those with keys

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._layer_indices.setdefault(layer_idx, len(self._layer_indices))
        if _sizes(key, value) == _sizes(self.keys[index], self.values[index]):
            return self._write(index, key, value)
        _pending_writes.append(partial(self._write, index))
        return key, value

    def _convolve(
        self, state_index: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        slot = self.states[state_index]
        output, self.states[state_index] = recurrence.convolve(x, weight, bias, slot, self.position)
        return output

    def _recur(self, state_index: int, inputs: RecurrenceInputs) -> torch.Tensor:
        slot = self.states[state_index]
        output, self.states[state_index] = recurrence.recur(*inputs, slot, self.position)
        return output

    def _write(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer_idx] = self._scatter(self.keys[layer_idx], key)
        self.values[layer_idx] = self._scatter(self.values[layer_idx], value)
        return self.keys[layer_idx], self.values[layer_idx]

    def _scatter(self, slot: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic(
                "TensorScatter",
                [slot, rows, self.position],
                {"axis": 2, "mode": "linear"},
                dtype=slot.dtype,
                shape=slot.shape,
                version=24,
            )
        batch = torch.arange(slot.shape[0], device=slot.device)[:, None]
        row_index = self.position[:, None] + torch.arange(rows.shape[2], device=slot.device)
        slot[batch, :, row_index] = rows.transpose(1, 2)  # in place; [B, N, Hkv, D]
        return slot

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:
        return self.position

    def get_mask_sizes(self, q_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.keys[0].shape[2], 0


def _empty_slot(like: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty slot, and position 0."""
    return like.new_zeros(*sizes), torch.zeros(sizes[0], dtype=torch.long)


def _sizes(key: torch.Tensor, value: torch.Tensor) -> list[tuple[int, int]]:
    return [(rows.shape[1], rows.shape[3]) for rows in (key, value)]


class RecordingCache(StateCache):
    """An empty cache that records what each layer stores, or what its attention receives if that
    has another width."""

    def __init__(self) -> None:
        super().__init__()
        _pending_writes.clear()
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.states: dict[int, tuple[int, int]] = {}  # (H, D) of a row
        self.reach = 0  # how many rows before its first token a call reads

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer_idx], self.values[layer_idx] = key, value
        _pending_writes.append(partial(self._record_attended, layer_idx))
        return key, value

    def _convolve(
        self, state_index: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        (batch, channels, _), taps = x.shape, weight.shape[1]
        self.states[state_index], self.reach = (1, channels), max(self.reach, taps - 1, 1)
        return recurrence.convolve(x, weight, bias, *_empty_slot(x, batch, 1, taps, channels))[0]

    def _recur(self, state_index: int, inputs: RecurrenceInputs) -> torch.Tensor:
        query, key, value, decay, beta = inputs
        batch, _, heads, width = value.shape
        row = query.shape[3] * width
        self.states[state_index], self.reach = (heads, row), max(self.reach, 1)
        # In float32 also for a half-precision model, which is refused later on.
        wide = query.float(), key.float(), value.float(), decay.float()
        beta = None if beta is None else beta.float()
        output, _ = recurrence.recur(*wide, beta, *_empty_slot(wide[2], batch, heads, 1, row))
        return output.to(value.dtype)

    def _record_attended(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        widths = key.shape[3], value.shape[3]
        if widths != (self.keys[layer_idx].shape[3], self.values[layer_idx].shape[3]):
            self.keys[layer_idx], self.values[layer_idx] = key, value
        return key, value

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, q_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return q_length, 0


def limit_logits(model: PreTrainedModel, logits_index: torch.Tensor) -> RemovableHandle:
    """A context in which only these of the N positions get logits. Not by `logits_to_keep`, which
    encoder-decoders lack and which some models pass on to their attention."""
    outputs: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hook: RemovableHandle
    hook = outputs.register_forward_pre_hook(lambda _, x: x[0][:, logits_index])
    return hook


class Decoder(torch.nn.Module):
    """`forward(input_ids [B, N], position [B], logits_index [K], keys, values, states)`.

    Returns logits [B, K, V] and the updated keys and values, each [B, Hkv, S, D], and states, each
    [B, H, R, D].
    """

    def __init__(self, model: PreTrainedModel, max_positions: int | None):
        super().__init__()
        self.model = model
        self.max_positions = max_positions  # size of a learned position table, or None

    def forward(
        self,
        input_ids: torch.Tensor,
        position: torch.Tensor,
        logits_index: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        states: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        cache = SlotCache(keys, values, position, states)
        device, width = input_ids.device, input_ids.shape[1]
        position_ids = position[:, None] + torch.arange(width, device=device)[None]
        if self.max_positions is not None:
            # Drafted rows beyond the table are never read, but the look-up must stay within it.
            position_ids = position_ids.clamp(max=self.max_positions - 1)
        with limit_logits(self.model, logits_index), patched_layers(self.model):
            logits = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            ).logits
        cache.check()
        return logits.float(), cache.keys, cache.values, cache.states


@dataclass(frozen=True)
class Example:
    """Arguments to trace a module with.

    dynamic_shapes: the dynamic sizes of the arguments, in torch.export's form. inputs, outputs:
    their names in the contract.
    """

    arguments: tuple[Any, ...]
    dynamic_shapes: tuple[Any, ...]
    inputs: list[str]
    outputs: list[str]


def example(
    key_shapes: Shapes,
    value_shapes: Shapes,
    capacity: int,
    dtype: torch.dtype,
    state_shapes: Shapes = (),
    state_rows: int = 0,
) -> Example:
    """An example for tracing a `Decoder`, with dynamic B slots, N tokens, K outputs and S rows.

    capacity: S of the example; a backend that needs a fixed S fixes it to this. state_rows: R.
    """
    names = ("slots", "tokens", "outputs", "rows")
    slots, tokens, outputs, rows = (torch.export.Dim(name) for name in names)
    caches = [example_caches(shapes, capacity, dtype) for shapes in (key_shapes, value_shapes)]
    if state_shapes:
        caches.append(example_caches(state_shapes, state_rows, dtype))
    # Sizes of 2 and 3, not 1: torch.export specialises a size of 1 to a constant.
    arguments = (
        torch.zeros(2, 3, dtype=torch.long),
        torch.tensor([0, 1]),
        torch.tensor([0, 2]),
        *caches,
    )
    dynamic_caches = [[{0: slots, 2: rows} for _ in side] for side in caches[:2]]
    if state_shapes:
        dynamic_caches.append([{0: slots} for _ in state_shapes])
    sides = (("key", key_shapes), ("value", value_shapes), ("state", state_shapes))
    cache_names = [name for side in sides for name in layer_names(*side)]
    return Example(
        arguments,
        ({0: slots, 1: tokens}, {0: slots}, {0: outputs}, *dynamic_caches),
        ["input_ids", "position", "logits_index", *cache_names],
        ["logits", *(f"{name}_out" for name in cache_names)],
    )


def example_caches(shapes: Shapes, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Caches of two slots: for each layer [2, Hkv, rows, D]."""
    return [torch.zeros(2, heads, rows, width, dtype=dtype) for heads, width in shapes]


def layer_names(name: str, layers: Sequence[object]) -> list[str]:
    """The contract's names for a tensor that each layer has."""
    return [f"{name}_{i}" for i in range(len(layers))]
