"""Route Transformers' layers that carry a state to the functions of recurrence.py.

Such a layer asks its cache for the state, and calls a function by its name in the layer's module.
While a model is traced, both are replaced by ours (see replaced.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.activations import ACT2FN


class UnsupportedArchitecture(Exception):
    """The graph cannot express this model; the message is the reason."""


# The inputs of a recurrence: query, key, value, decay, beta; see `recurrence.recur`.
RecurrenceInputs = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None
]

# States that the current layer has asked its cache for, and has not computed yet.
_pending_convolutions: list[Callable[..., torch.Tensor]] = []
_pending_recurrences: list[Callable[..., torch.Tensor]] = []


def _take_pending(pending: list[Any]) -> Any:
    if not pending:
        raise UnsupportedArchitecture("it keeps its state outside Transformers' cache")
    return pending.pop()


def _causal_conv1d(
    hidden_states: torch.Tensor,  # [B, C, N]
    weight: torch.Tensor,  # [C, K]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    y: torch.Tensor = _take_pending(_pending_convolutions)(hidden_states, weight, bias)
    return y if activation is None else ACT2FN[activation](y)


def _delta_rule(
    query: torch.Tensor,  # [B, N, G, K]
    key: torch.Tensor,
    value: torch.Tensor,  # [B, N, H, V]
    g: torch.Tensor,  # [B, N, H], or one per element of a key [B, N, H, K]
    beta: torch.Tensor,  # [B, N, H]
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    output = _take_pending(_pending_recurrences)(
        (query, key, value, g if g.dim() == 4 else g[..., None], beta)
    )
    return output, output  # in place of the state, which is in the cache


def _mamba2(
    hidden_states: torch.Tensor,  # [B, N, H, V]
    dt: torch.Tensor,  # [B, N, H]
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    low, high = dt_limit
    dt = dt.clamp(low, None if high == float("inf") else high)
    output = _take_pending(_pending_recurrences)(
        (C, B, hidden_states * dt[..., None], (A * dt)[..., None], None)
    )
    output = output if D is None else output + D[:, None] * hidden_states
    return (output, output) if return_final_states else output


# By the names under which the layers of all architectures call them in their modules.
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}


class StateCache:
    """A cache that layers ask for the states they carry. Each state is updated by the function that
    the layer calls next. States are numbered in the order in which they are requested."""

    is_compileable = False
    is_sliding = is_linear = is_dummy = ()  # all layers have rows like the first

    def __init__(self) -> None:
        self.state_count = 0  # states requested so far
        _pending_convolutions.clear()
        _pending_recurrences.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are passed explicitly; none may be derived from this

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # otherwise a call of one token would update its states itself

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        _pending_convolutions.append(partial(self._convolve, self.state_count))
        self.state_count += 1
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        _pending_recurrences.append(partial(self._recur, self.state_count))
        self.state_count += 1

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.check()
        return recurrent_states

    def check(self) -> None:
        """Raise UnsupportedArchitecture if a state was requested but not computed."""
        if _pending_convolutions or _pending_recurrences:
            raise UnsupportedArchitecture("it carries a state that the graph cannot express")

    def _convolve(
        self, state_index: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError

    def _recur(self, state_index: int, inputs: RecurrenceInputs) -> torch.Tensor:
        raise NotImplementedError
