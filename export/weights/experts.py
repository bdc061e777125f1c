"""Mixtures of experts: the computation of a layer's experts, with weights of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import layers
from .blocks import Quantised
from .feedback import factor, quantise4

PRODUCT = "QuantizedExperts"  # a node until the graph is rewritten in ONNX's operators


class QuantisedExperts(torch.nn.Module):
    """A quantised weight of E experts, each [N, K], which replaces the parameter."""

    levels: torch.Tensor  # int8 [E N, K]
    scales: torch.Tensor  # float32 [E N, K / BLOCK, rounded up]

    def __init__(self, weight: Quantised, experts: int):
        super().__init__()
        self.bits, self.experts, self.rows = weight.bits, experts, len(weight.levels) // experts
        self.register_buffer("levels", torch.from_numpy(weight.levels))
        self.register_buffer("scales", torch.from_numpy(weight.scales).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Product with all experts, as a node of a graph: [1 or E, T, K] -> [E, T, N]."""
        return torch.onnx.ops.symbolic(
            f"outrider::{PRODUCT}",
            [x, self.levels, self.scales],
            {"bits": [self.bits], "experts": self.experts},
            dtype=x.dtype,
            shape=(self.experts, x.shape[1], self.rows),
            version=1,
        )

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Product with one expert: [n, K] -> [n, N]."""
        own = slice(expert * self.rows, (expert + 1) * self.rows)
        return layers.multiply(x, self.levels[own], self.scales[own])


def are_experts(module: torch.nn.Module) -> bool:
    """Whether the module holds experts that Transformers computes through its interface."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def experts(
    self: Any,  # the experts of one layer, as transformers.integrations.moe describes them
    hidden: torch.Tensor,  # [T, H]
    top_k_index: torch.Tensor,  # int64 [T, k]
    top_k_weights: torch.Tensor,  # [T, k]
) -> torch.Tensor:
    """Compute the experts of a layer.

    In a graph every expert computes every token, and the routing weights keep k of them in the sum:
    this takes only standard operators and shapes that do not depend on data, at E / k times the
    arithmetic. With quantised weights, `host/experts.py` reduces that to the chosen experts.

    Outside of a graph, weights that are narrower than the activations are widened for one expert at
    a time, and only for the chosen ones.
    """
    if torch.onnx.is_in_onnx_export() or getattr(self.down_proj, "dtype", 0) == hidden.dtype:
        chosen = torch.nn.functional.one_hot(top_k_index.T, self.num_experts)  # [k, T, E]
        routing = (chosen * top_k_weights.T[..., None]).sum(0).to(hidden.dtype)  # [T, E]
        return (_compute(self, hidden[None]) * routing.T[..., None]).sum(0)
    total = torch.zeros_like(hidden)
    for expert in sorted(set(top_k_index.flatten().tolist())):
        token, place = torch.where(top_k_index == expert)
        out = _compute(self, hidden[token], expert) * top_k_weights[token, place, None]
        total.index_add_(0, token, out.to(total.dtype))
    return total


def quantise_experts(
    self: Any, name: str, weight: torch.Tensor, hidden: torch.Tensor, chosen: torch.Tensor
) -> Quantised:
    """Quantise the parameter of that name, [E N, K], to 4 bits with error feedback. hidden [T, H],
    chosen [T, k]: the inputs of the experts.

    The first products of all experts are weighted by all tokens. The last product of an expert is
    weighted by the intermediate values of the tokens routed to it: using all tokens gives worse
    results there, even if few tokens are routed to the expert.
    """
    if name != "down_proj":
        return quantise4(weight, factor(hidden))
    parts = []
    for expert, own in enumerate(weight.view(self.num_experts, -1, weight.shape[1])):
        routed = hidden[(chosen == expert).any(-1)]
        own_factor = factor(_inner(self, routed, expert)) if len(routed) else None
        parts.append(quantise4(own, own_factor))
    levels, scales = zip(*((part.levels, part.scales) for part in parts), strict=True)
    return Quantised(np.concatenate(levels), np.concatenate(scales), 4)


def _compute(self: Any, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
    """Apply all experts, [1, T, H] -> [E, T, H], or one, [n, H] -> [n, H]."""
    out = _product(self, _inner(self, x, expert), "down_proj", expert)
    return self.post_expert_norm(out) if self.has_post_expert_norm else out


def _inner(self: Any, x: torch.Tensor, expert: int | None) -> torch.Tensor:
    """The input of the last product."""
    if self.has_gate:
        inner: torch.Tensor = self._apply_gate(_product(self, x, "gate_up_proj", expert))
    else:
        inner = self.act_fn(_product(self, x, "up_proj", expert))
    return inner


def _product(self: Any, x: torch.Tensor, name: str, expert: int | None) -> torch.Tensor:
    weight = getattr(self, name)
    if isinstance(weight, QuantisedExperts):
        y = weight(x) if expert is None else weight.multiply(x, expert)
    else:
        part = weight if expert is None else weight[expert].to(x.dtype)
        y = x @ (part if self.is_transposed else part.transpose(-1, -2))
    if self.has_bias:
        bias = getattr(self, f"{name}_bias")
        y = y + (bias[:, None] if expert is None else bias[expert])
    return y
