"""The inputs of each matrix while the model reads texts, and the weight of each token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..encoder import arguments
from .blocks import Quantised
from .experts import are_experts, quantise_experts
from .feedback import factor, quantise4
from .quality import Texts

Replace = Callable[[str, Callable[[torch.Tensor], Quantised]], None]


class Reader:
    """Runs a model on texts, and quantises each matrix as soon as its inputs are known.

    The error of a value reaches an attention's output in proportion to the attention that its token
    gets. In trained models much of that goes to a text's first token (Xiao et al. 2023, arXiv
    2309.17453), one input of many. So each token is weighted by the attention that it gets, for the
    matrices whose outputs enter the attention. For queries there is no such reason, but weighting
    them too was no worse (docs/LOG.md), and lets all of them share one factor, also if one matrix
    combines several.

    paths: by the name of each matrix. replace: replaces a matrix, given its name and a function
    that quantises it.
    """

    def __init__(self, model: PreTrainedModel, paths: dict[str, list[str]], replace: Replace):
        self._model, self._paths, self._replace = model, paths, replace
        # Inputs, weights of the tokens, and the factor, which queries, keys and values share.
        self._last_factor: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None = None
        # The attention layer, its input, and the attention that each token of the input gets.
        self._attended: tuple[Any, Any, torch.Tensor] | None = None
        self._looking_ahead = False

    def read(self, texts: Texts) -> torch.Tensor | None:
        """Run the model on the texts; returns its last hidden states, [T, K], which are usually the
        inputs of the output matrix, or None if it returns none."""
        hooks, attentions = [], set()
        for name, paths in self._paths.items():
            for owner, child in (owner_of(self._model, path) for path in paths):
                if are_experts(owner):
                    hook = partial(self._quantise_experts, name, child)
                    hooks.append(owner.register_forward_pre_hook(hook))
                    continue
                hook = partial(self._quantise, name, owner)
                hooks.append(getattr(owner, child).register_forward_pre_hook(hook))
                if "Attention" in type(owner).__name__:  # Transformers' naming convention
                    attentions.add(owner)
        for layer in attentions:
            hooks.append(layer.register_forward_pre_hook(self._look_ahead, with_kwargs=True))
        try:
            model_inputs = arguments(self._model, texts.ids, texts.sources)
            output: Any = self._model.base_model(**model_inputs, use_cache=False)
        finally:
            for handle in hooks:
                handle.remove()
        last: torch.Tensor | None = output.get("last_hidden_state")
        return None if last is None else last.flatten(0, -2)

    def _quantise(self, name: str, owner: Any, module: Any, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0]
        if self._looking_ahead or x.numel() == 0:  # no token was routed to this expert
            return
        counts = None
        if self._attended is not None and self._attended[0] is owner and self._attended[1] is x:
            counts = self._attended[2]
        if (
            self._last_factor is None
            or self._last_factor[0] is not x
            or self._last_factor[1] is not counts
        ):
            rows = x.flatten(0, -2)
            if counts is not None:
                rows = rows * counts.sqrt()[:, None]
            self._last_factor = x, counts, factor(rows)
        shared_factor = self._last_factor[2]
        self._replace(name, lambda weight: quantise4(weight, shared_factor))
        # In this call the old module still computes the product.
        old_module: Any = self._model.get_submodule(self._paths[name][0])
        weight = old_module.weight.T if isinstance(module, Conv1D) else old_module.weight
        module.weight = torch.nn.Parameter(weight, requires_grad=False)

    def _quantise_experts(
        self, name: str, child: str, module: Any, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        hidden, chosen, _ = inputs
        make = partial(quantise_experts, module, child, hidden=hidden, chosen=chosen)
        self._replace(name, make)

    def _look_ahead(self, layer: Any, args: Any, options: dict[str, Any]) -> None:
        """Determine the attention that each token gets, before the layer's matrices are
        quantised."""
        # XLM writes to its cache even if none is wanted.
        keywords = {**options, "cache": None} if "cache" in options else options
        self._looking_ahead = True
        try:
            output = layer.forward(*args, **keywords)
        finally:
            self._looking_ahead = False
        source = options.get("key_value_states", options.get("encoder_hidden_states"))
        if source is None:
            source = args[0] if args else options.get("hidden_states")
        counts = _received_attention(output)
        if counts is None or not isinstance(source, torch.Tensor):
            return
        if len(counts) == source[..., 0].numel():
            self._attended = layer, source, counts


def owner_of(model: PreTrainedModel, path: str) -> tuple[Any, str]:
    """The owner of the module or parameter at this path, and the name in it."""
    parent, _, child = path.rpartition(".")
    return model.get_submodule(parent), child


def _received_attention(output: Any) -> torch.Tensor | None:
    """The total attention that each token gets, float32 [B S], from the output of an attention
    layer; None if unknown. Transformers' eager attention returns its probabilities, [B, H, N, S];
    other layers return a state in that place, or nothing."""
    found = [part for part in output if isinstance(part, torch.Tensor) and part.dim() == 4]
    if not found or found[-1].min() < 0 or not found[-1].sum(-1).max() < 1.01:
        return None
    return found[-1].sum((1, 2), dtype=torch.float32).flatten()
