"""Which matrices of 4 bits had better have 8: those that cost the model the most for their bytes.

Rounding moves the outputs of a matrix by e = dW x for an input x. To second order the next-token
distribution is then off by KL = E[(g . e)^2] / 2, g being the gradient of the log-likelihood of a
token that the model draws, which is Fisher's information. One backward pass has the g of all
matrices. The terms of g . e are squared and then added, in place of the square of their sum: it is
less noisy over few tokens, and chose no worse (docs/LOG.md). Rows that are looked up are as few as
tokens, and for some of them the second order would say five nats, which is far too much: there the
sum is squared, and beyond a nat it counts linearly (Huber 1964).
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
from .blocks import AT_ONCE, row_slices
from .layers import QuantisedTable, dense
from .quality import Texts

_LARGEST = 8  # matrices that may come first


class NoCosts(Exception):
    """Of a model that has no gradients, with the reason."""


def costs(
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    layers: Mapping[str, Iterable[torch.nn.Module]],
    texts: Texts,
) -> dict[str, float]:
    """What each matrix costs the quantised model, nats of KL a token, by the names of `weights`.

    weights: [N, K] as they were. layers: those that have each, quantised ones. What the model's
    parameters have of gradients is switched off. Raises NoCosts.
    """
    if not weights:
        raise NoCosts("none of those that may have 8 bits is rounded to 4")
    found = dict.fromkeys(weights, 0.0)

    def watch(name: str, layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if output.requires_grad:  # not before the first embedding
            x, squares = inputs[0].detach(), _of_products
            if isinstance(layer, QuantisedTable):
                squares = partial(_of_rows, made=output.detach())

            def came(gradient: torch.Tensor) -> None:
                found[name] += squares(gradient, x, weights[name], layer)

            output.register_hook(came)  # type: ignore[no-untyped-call]

    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    hooks = [table.register_forward_hook(_begin) for table in tables]
    for name in weights:
        hooks += [layer.register_forward_hook(partial(watch, name)) for layer in layers[name]]
    model.requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    try:
        for i in range(len(texts.ids)):  # of all together the logits are gigabytes
            with torch.enable_grad():
                one = texts[i : i + 1]
                given = arguments(model, one.ids, one.sources)
                logits = model(**given, use_cache=False).logits[0].float()
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


def dearest(costs: Mapping[str, float], sizes: Mapping[str, int], room: float) -> list[str]:
    """Those that cost the most for each byte that they would take, as many as there is room for; or
    one or two of the largest and then as many, where they cost more together: an embedding of half
    a model's bytes would wait until all others have theirs, in room that nobody uses."""
    order = sorted(costs, key=lambda name: costs[name] / sizes[name], reverse=True)

    def filled(first: Iterable[str]) -> list[str]:
        left, chosen = room, []
        for name in dict.fromkeys([*first, *order]):
            if sizes[name] <= left:
                chosen.append(name)
                left -= sizes[name]
        return chosen

    largest = sorted(costs, key=lambda name: sizes[name])[-_LARGEST:]
    ways = [filled(first) for count in range(3) for first in combinations(largest, count)]
    return max(ways, key=lambda chosen: sum(costs[name] for name in chosen))


def _begin(table: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """The same, from which on gradients are kept. A copy, as some models go on in place."""
    return output.detach().requires_grad_().clone()


def _of_products(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, layer: Any
) -> float:
    """The squares for inputs x [.., K] and gradients [.., N], added up."""
    gradient, x = gradient.flatten(0, -2).float(), x.flatten(0, -2).float()
    total, (rows, columns) = 0.0, weight.shape
    for here in row_slices(rows, columns, AT_ONCE):
        lost = dense(layer.levels[here], layer.scales[here]).float() - weight[here].float()
        total += float((gradient[:, here] * (x @ lost.T)).square().sum())
    return total


def _of_rows(
    gradient: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, layer: Any, made: torch.Tensor
) -> float:
    """The same of rows that were looked up, which some models scale: `made`, [.., K]. Sums of the
    products are squared, and are no squares beyond 1."""
    rows = dense(layer.levels[ids], layer.scales[ids].float())
    scale = made.float().norm(dim=-1) / rows.norm(dim=-1).clamp(min=1e-30)
    lost = (rows - weight[ids].float()) * scale[..., None]
    moved = (gradient.float() * lost).sum(-1)
    return 2 * float(
        torch.nn.functional.huber_loss(moved, torch.zeros_like(moved), reduction="sum")
    )
