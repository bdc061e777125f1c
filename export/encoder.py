"""Encoder-decoders: the encoder as a separate graph, and the decoder that reads its output.

The encoder runs once per request. Its output is the keys and values of each decoder layer's
attention to the source: constants of the slot, which the decoder's graph reads. As with the causal
decoder (`decoder.py`), both are Transformers' own code, traced through its interfaces:

- the keys and values are those that the decoder stores in its cache for the source;
- relative positions are the architecture's own bias (`compute_bias`), looked up for each slot;
- a position table looks up the tokens of all slots as if they were one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from runtime.files.generation import FeatureFacts

from .decoder import (
    Decoder,
    Example,
    RecordingCache,
    Shapes,
    SlotCache,
    example_caches,
    layer_names,
    limit_logits,
)
from .functions.stateful_layers import UnsupportedArchitecture

STATES = "encoder_states"


class TextAndSourceCache(EncoderDecoderCache):
    """Two caches as Transformers' decoders expect them: one for the text, one for the source.

    written: number of layers whose keys and values of the source are present, and are not computed
    again.
    """

    is_compileable = False

    def __init__(self, text: Any, source: Any, written: int = 0):
        self.self_attention_cache, self.cross_attention_cache = text, source
        self.is_updated = dict.fromkeys(range(written), True)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        text = self.self_attention_cache
        # The position of each slot's first token, [B, 1], to which offsets in the call are added.
        return text.position[:, None] if isinstance(text, SlotCache) else 0


class Encoder(torch.nn.Module):
    """`forward(source)` returns the keys and values of each decoder layer's attention to the
    source, each [1, H, E, D], and the states that they are computed from, [1, E, D'].

    source: token ids [1, E], or features [1, F, T], which the encoder turns into E rows. If
    `shared`, it is the states that another model's encoder returned, and none are returned.
    """

    def __init__(self, model: PreTrainedModel, shared: bool):
        super().__init__()
        self.model, self.shared = model, shared

    def forward(self, source: torch.Tensor) -> tuple[Any, ...]:
        source_cache = RecordingCache()
        if self.shared:
            inputs: dict[str, Any] = {"encoder_outputs": BaseModelOutput(last_hidden_state=source)}
        else:
            inputs = source_arguments(self.model, source)
        states = self.model(
            # The decoder's output is not used, so its computation is not in the graph.
            decoder_input_ids=torch.zeros(1, 1, dtype=torch.long, device=source.device),
            past_key_values=TextAndSourceCache(RecordingCache(), source_cache),
            use_cache=True,
            **inputs,
        ).encoder_last_hidden_state
        sides = list(source_cache.keys.values()), list(source_cache.values.values())
        return sides if self.shared else (*sides, states)


def source_arguments(model: PreTrainedModel, source: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sources as arguments of the whole model: token ids [B, E], or features [B, F, T]."""
    name = model.main_input_name
    if source.is_floating_point():
        return {name: source.to(model.dtype)}
    return {name: source, "attention_mask": source * 0 + 1}


def arguments(
    model: PreTrainedModel, ids: torch.Tensor, sources: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Sequences [B, T] as arguments of the whole model, with their sources if it has an encoder."""
    if sources is None:
        return {"input_ids": ids}
    return {**source_arguments(model, sources), "decoder_input_ids": ids}


def example_source(features: FeatureFacts | None) -> torch.Tensor:
    """A source to trace an encoder with. features: those that it reads; None for 3 token ids."""
    # 3, not 1: as in `example`.
    if features is None:
        return torch.zeros(1, 3, dtype=torch.long)
    return torch.zeros(1, features.feature_size, features.frames)


class SourceDecoder(Decoder):
    """As `Decoder`, for encoder-decoders: `forward(.., cross_keys, cross_values, source_length)`.

    cross_keys, cross_values: per layer [B, H, E, D]. source_length: int64 [B], how many of the E
    rows belong to the source.
    """

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position: torch.Tensor,
        logits_index: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        cross_keys: list[torch.Tensor],
        cross_values: list[torch.Tensor],
        source_length: torch.Tensor,
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        text = SlotCache(keys, values, position)
        layers = [
            SimpleNamespace(keys=key, values=value)
            for key, value in zip(cross_keys, cross_values, strict=True)
        ]
        slots, rows = cross_keys[0].shape[0], cross_keys[0].shape[2]
        position_arguments: dict[str, torch.Tensor] = {}
        if "decoder_position_ids" in signature(self.model.forward).parameters:
            width = torch.arange(input_ids.shape[1], device=position.device)
            position_arguments = {"decoder_position_ids": position[:, None] + width}
        slotwise = _positions_per_slot(self.model, self.max_positions)
        with slotwise, limit_logits(self.model, logits_index):
            logits = self.model(
                # Never read: the keys and values that they would be projected to are present.
                encoder_outputs=BaseModelOutput(cross_keys[0].new_zeros(slots, rows, 1)),
                attention_mask=torch.arange(rows, device=position.device) < source_length[:, None],
                decoder_input_ids=input_ids,
                past_key_values=TextAndSourceCache(
                    text, SimpleNamespace(layers=layers), len(layers)
                ),
                use_cache=True,
                **position_arguments,
            ).logits
        return logits.float(), text.keys, text.values


@contextmanager
def _positions_per_slot(model: PreTrainedModel, max_positions: int | None) -> Iterator[None]:
    """Within the context, positions are computed for each slot separately: Transformers' encoder-
    decoders assume one length for all."""
    with ExitStack() as replaced:

        def replace(module: Any, name: str, by: Callable[..., torch.Tensor]) -> None:
            own = partial(by, getattr(module, name))
            replaced.enter_context(patch.object(module, name, own))

        for module in model.modules():
            if hasattr(module, "compute_bias"):
                replace(module, "compute_bias", _bias_per_slot)
            names = signature(module.forward).parameters.keys()
            if {"position_ids", "past_key_values_length", "token_type_ids"} <= names:
                raise UnsupportedArchitecture("it numbers the positions of all slots alike")
            if {"position_ids", "past_key_values_length"} <= names:
                replace(module, "forward", partial(_embed_positions_per_slot, max_positions))
            if hasattr(module, number := "create_position_ids_from_input_ids"):
                replace(module, number, partial(_number_positions, max_positions))
        yield


def _bias_per_slot(
    compute: Callable[..., torch.Tensor],  # returns [1, H, N, S], for tokens from past_seen_tokens
    query_length: int,
    key_length: int,
    device: Any = None,
    past_seen_tokens: torch.Tensor | int = 0,  # [B, 1], or 0
) -> torch.Tensor:
    """Relative bias [B, H, N, S], or [1, H, N, S] if all slots begin at 0.

    It depends only on the distance from the query back to the key, so the biases of a query in the
    last row include all distances. Keys after a query are masked.
    """
    if isinstance(past_seen_tokens, int):
        return compute(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
    table = compute(1, key_length, device=device, past_seen_tokens=key_length - 1)[0, :, 0]
    queries = past_seen_tokens + torch.arange(query_length, device=device)  # [B, N]
    behind = queries[:, :, None] - torch.arange(key_length, device=device)
    return table[:, key_length - 1 - behind.clamp(min=0)].transpose(0, 1)


def _embed_positions_per_slot(
    max_positions: int | None,
    table: Callable[..., torch.Tensor],
    input_ids: Any,
    past_key_values_length: Any = 0,
    position_ids: torch.Tensor | None = None,  # [B, N]
) -> torch.Tensor:
    """Position embeddings [B, N, D]."""
    if position_ids is None or position_ids.dim() < 2:
        return table(input_ids, past_key_values_length, position_ids=position_ids)
    if max_positions is not None:  # as in `Decoder`
        position_ids = position_ids.clamp(max=max_positions - 1)
    # Pegasus-X passes embeddings [B, N, D] and takes positions as a column. Others: ids or a shape.
    if isinstance(input_ids, torch.Tensor) and input_ids.is_floating_point():
        rows = input_ids.reshape(1, -1, input_ids.shape[-1])
        return table(rows, 0, position_ids=position_ids.reshape(-1, 1)).reshape(input_ids.shape)
    found = table(input_ids, 0, position_ids=position_ids.reshape(-1))
    return found.reshape(*position_ids.shape, -1)


def _number_positions(
    max_positions: int | None,
    _: Callable[..., torch.Tensor],
    input_ids: torch.Tensor,  # [B, N]
    padding_idx: int,
    past_key_values_length: torch.Tensor,  # [B, 1]
) -> torch.Tensor:
    """Position numbers [B, N], for each token as if it were alone in its call. M2M100 counts the
    tokens of a call that are not padding, so the output would depend on the split into calls."""
    number = past_key_values_length + torch.arange(input_ids.shape[1], device=input_ids.device)
    if max_positions is not None:  # as in `Decoder`
        number = number.clamp(max=max_positions - 1)
    return (number + 1) * input_ids.ne(padding_idx) + padding_idx


def example_encoder(
    key_shapes: Shapes,
    value_shapes: Shapes,
    features: FeatureFacts | None,
    states: torch.Tensor | None = None,
) -> Example:
    """An example for tracing an `Encoder`, with dynamic E if it reads ids; the shapes are those of
    the source's caches. states: the input of a shared one, with E = 3 or all audio rows."""
    outputs = [*layer_names("cross_key", key_shapes), *layer_names("cross_value", value_shapes)]
    dynamic_shapes = {} if features else {1: torch.export.Dim("source")}
    if states is not None:
        return Example((states,), (dynamic_shapes,), [STATES], outputs)
    name = "input_features" if features else "input_ids"
    return Example((example_source(features),), (dynamic_shapes,), [name], [*outputs, STATES])


def encoder_states(model: PreTrainedModel, source: torch.Tensor) -> torch.Tensor:
    """The encoder's output for these sources, [B, E, D]; see `source_arguments`."""
    encoder: Any = model.get_encoder()
    with torch.no_grad():
        states: torch.Tensor = encoder(**source_arguments(model, source)).last_hidden_state
    return states


def example_decoder(text: Example, key_shapes: Shapes, value_shapes: Shapes) -> Example:
    """An example for tracing a `SourceDecoder`. text: that of a `Decoder`."""
    slots, source = text.dynamic_shapes[1][0], torch.export.Dim("source")
    dtype = text.arguments[-1][0].dtype
    caches = [example_caches(shapes, 5, dtype) for shapes in (key_shapes, value_shapes)]
    dynamic_caches = [[{0: slots, 2: source} for _ in side] for side in caches]
    names = [*layer_names("cross_key", key_shapes), *layer_names("cross_value", value_shapes)]
    return Example(
        (*text.arguments, *caches, torch.tensor([1, 2])),
        (*text.dynamic_shapes, *dynamic_caches, {0: slots}),
        [*text.inputs, *names, "source_length"],
        text.outputs,
    )
