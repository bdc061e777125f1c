"""The matrices of a model, quantised in place: what is traced afterwards is the quantised model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .blocks import Bits, Quantised, quantise
from .feedback import factor, quantise_with_feedback
from .recover import recover

# The last part of a module's name. A router decides between experts, by small differences; it is
# next to no bytes.
_ROUTERS = ("gate", "router")


def quantise_model(
    model: PreTrainedModel,
    bits: Bits,
    texts: torch.Tensor | None = None,  # int64 [texts, length], of `quality.sample`
    output_bits: Bits = 8,
    keep: bool = False,  # the levels of what lies on some already
    negative: bool = True,  # also where a scale of theirs of 8 bits is negative
) -> dict[str, Quantised]:
    """Quantise the model's matrices and write what they are then, `dense()`, into its parameters.

    By the name of the parameter (of `named_parameters`, where a tied one has the embedding's name):
    the weights of linear layers, the output matrix, tied or not, and an untied embedding. Levels
    lie [N outputs, K inputs] for GPT-2's `Conv1D` too, whose weight is [K, N]. Routers of experts,
    and what is not two-dimensional, stay as they are.

    With texts, 4 bits are rounded with error feedback. Every matrix sees its inputs as the
    quantised matrices before it make them: all are quantised in one pass, each when it is called.
    The output matrix has 8 bits, since 4 bits there cost more than in all other matrices together:
    per byte seven times as much on the bundled target. An untied embedding, of which a row is
    read, has 8 bits too.
    Raises ValueError for NaN, infinity and what no float16 scale reaches, with the name.
    """
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()  # type: ignore[no-untyped-call]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inner = {names[id(module.weight)]: module for module in _linear(model) if module is not output}
    texts = texts if bits == 4 else None  # of 8 bits there is nothing to gain
    found = _recovered(inner | {names[id(output.weight)]: output}, bits, negative) if keep else {}
    with torch.no_grad():
        # The ends first: what the layers see of the embedding is to be what they will see of it.
        seen = None
        most: Bits = 8 if bits == 8 else output_bits
        if texts is not None and most == 4:
            seen = factor(model.base_model(input_ids=texts).last_hidden_state.flatten(0, -2))
        if (name := names[id(output.weight)]) not in found:
            found[name] = _take(name, output, most, seen)
        if (name := names[id(embedding.weight)]) not in found:
            found[name] = _take(name, embedding, 8)
        if texts is not None:
            _pass(model, texts, inner, found)
        for name in inner.keys() - found.keys():  # no texts, or none that came by
            found[name] = _take(name, inner[name], bits)
    return found


def _recovered(modules: dict[str, Any], bits: Bits, negative: bool) -> dict[str, Quantised]:
    """Of a checkpoint that was quantised before: exactly what it says."""
    found = {}
    for name, module in modules.items():
        kept = recover(_matrix(module).numpy(), bits)
        if kept is not None and (negative or bits == 4 or not (kept.scales < 0).any()):
            found[name] = kept
    return found


def _pass(
    model: PreTrainedModel,
    texts: torch.Tensor,
    modules: dict[str, Any],
    found: dict[str, Quantised],
) -> None:
    """The model reads the texts, and each module is quantised when its inputs are there."""
    last: tuple[torch.Tensor, torch.Tensor] | None = None  # queries, keys and values share theirs

    def hook(name: str) -> Callable[[Any, tuple[torch.Tensor]], None]:
        def quantise_now(module: Any, inputs: tuple[torch.Tensor]) -> None:
            nonlocal last
            x = inputs[0]
            if name in found or x.numel() == 0:  # it is called again; no token went to this expert
                return
            if last is None or last[0] is not x:
                last = x, factor(x.flatten(0, -2))
            found[name] = _take(name, module, 4, last[1])

        return quantise_now

    hooks = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        model.base_model(input_ids=texts, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()


def _linear(model: PreTrainedModel) -> Iterator[Any]:
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and not path.endswith(_ROUTERS):
            yield module


def _take(name: str, module: Any, bits: Bits, seen: torch.Tensor | None = None) -> Quantised:
    """Quantise the module's weight [N, K], or [K, N] of a Conv1D, in place."""
    weight = _matrix(module)
    try:
        if seen is None:
            made = quantise(weight.numpy(), bits)
        else:
            made = quantise_with_feedback(weight, seen, bits)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    dense = torch.from_numpy(made.dense())
    module.weight.copy_(dense.T if isinstance(module, Conv1D) else dense)
    return made


def _matrix(module: Any) -> torch.Tensor:
    """float32 [N, K]."""
    turned = isinstance(module, Conv1D)
    weight: torch.Tensor = module.weight.T if turned else module.weight
    return weight.float().contiguous()
