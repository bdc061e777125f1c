"""Choose the 4-bit matrices that should get 8 bits: those that cost the model most for their bytes.

Rounding changes the outputs of a matrix by e = dW x for an input x. To second order, the next-token
distribution then differs by KL = E[(g . e)^2] / 2, where g is the gradient of the log-likelihood of
a token drawn from the model (Fisher's information). One backward pass gives g for all matrices. The
terms of g . e are squared and then added, instead of squaring their sum: this is less noisy over
few tokens, and chose no worse (docs/LOG.md). In a table, each token looks up only one row, and for
some rows the second order gives five nats, far too much: there the sum is squared, and counts
linearly beyond a nat (Huber 1964).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import torch
from transformers import PreTrainedModel

from runtime.files.errors import first_line

from ..encoder import arguments
from .blocks import LARGE_SLICE, row_slices
from .layers import QuantisedTable, dense
from .quality import Texts

_LARGEST = 8  # largest matrices, one or two of which may be chosen first


class NoCosts(Exception):
    """The costs cannot be estimated; the message is the reason."""


def costs(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    layers: Mapping[str, Iterable[torch.nn.Module]],
    texts: Texts,
) -> dict[str, float]:
    """The cost of each 4-bit matrix in the quantised model, in nats of KL per token, by name.

    weights: the original matrices [N, K]. layers: the quantised layers that use each of them. The
    model's parameters no longer require gradients afterwards. Raises NoCosts.
    """
    if not weights:
        raise NoCosts("no matrix that may have 8 bits was rounded to 4")
    found = dict.fromkeys(weights, 0.0)

    def record_costs(
        name: str, layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> None:
        if output.requires_grad:  # False before the first embedding
            x, cost_of = inputs[0].detach(), _product_cost
            if isinstance(layer, QuantisedTable):
                cost_of = partial(_row_cost, output=output.detach())

            def add_cost(gradient: torch.Tensor) -> None:
                found[name] += cost_of(gradient, x, weights[name], layer)

            output.register_hook(add_cost)  # type: ignore[no-untyped-call]

    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    hooks = [table.register_forward_hook(_start_gradients) for table in tables]
    for name in weights:
        hooks += [
            layer.register_forward_hook(partial(record_costs, name)) for layer in layers[name]
        ]
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    try:
        for i in range(len(texts.ids)):  # one by one: the logits of all would take gigabytes
            with torch.enable_grad():
                one = texts[i : i + 1]
                model_inputs = arguments(model, one.ids, one.sources)
                logits = model(**model_inputs, use_cache=False).logits[0].float()
                drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=random)[:, 0]
                loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
                loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - any model code may fail in any way
        raise NoCosts(first_line(error)) from None
    finally:
        for handle in hooks:
            handle.remove()
    if not all(map(math.isfinite, found.values())):
        raise NoCosts("its gradients are NaN or infinite")
    return {name: cost / 2 / texts.ids.numel() for name, cost in found.items()}


def choose_costliest(
    costs: Mapping[str, float], sizes: Mapping[str, int], budget: float
) -> list[str]:
    """The matrices with the highest cost per additional byte, as many as there is room for; or one
    or two of the largest first and then the others, if that saves more. Otherwise an embedding with
    half of a model's bytes might come last, and the room left for it stay unused."""
    order = sorted(costs, key=lambda name: costs[name] / sizes[name], reverse=True)

    def fill(first: Iterable[str]) -> list[str]:
        remaining, chosen = budget, []
        for name in dict.fromkeys([*first, *order]):
            if sizes[name] <= remaining:
                chosen.append(name)
                remaining -= sizes[name]
        return chosen

    largest = sorted(costs, key=lambda name: sizes[name])[-_LARGEST:]
    choices = [fill(first) for count in range(3) for first in combinations(largest, count)]
    return max(choices, key=lambda chosen: sum(costs[name] for name in chosen))


def _start_gradients(table: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """The same output, from which on gradients are recorded. A copy, as some models modify it in
    place."""
    return output.detach().requires_grad_().clone()


def _product_cost(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, layer: Any
) -> float:
    """The sum of the squares for inputs x [.., K] and gradients [.., N]."""
    gradient, x = gradient.flatten(0, -2).float(), x.flatten(0, -2).float()
    total, (rows, columns) = 0.0, weight.shape
    for here in row_slices(rows, columns, LARGE_SLICE):
        error = dense(layer.levels[here], layer.scales[here]).float() - weight[here].float()
        total += float((gradient[:, here] * (x @ error.T)).square().sum())
    return total


def _row_cost(
    gradient: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    layer: Any,
    output: torch.Tensor,
) -> float:
    """The same for rows of a table. output: that of the embedding [.., K], which some models scale.
    The sum of a token's products is squared up to 1, and counts linearly beyond."""
    rows = dense(layer.levels[ids], layer.scales[ids].float())
    scale = output.float().norm(dim=-1) / rows.norm(dim=-1).clamp(min=1e-30)
    error = (rows - weight[ids].float()) * scale[..., None]
    change = (gradient.float() * error).sum(-1)
    return 2 * float(
        torch.nn.functional.huber_loss(change, torch.zeros_like(change), reduction="sum")
    )
