"""What each matrix of a model sees when the model reads texts, and how much each token counts."""

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

Take = Callable[[str, Callable[[torch.Tensor], Quantised]], None]


class Reader:
    """A model that reads texts, each of whose matrices is quantised when its inputs are there.

    What a value is wrong by comes out of an attention as often as its token is attended to, and in
    trained models much of that may be a text's first token (Xiao et al. 2023, arXiv 2309.17453),
    one input of many. So a token counts that much for the matrices that an attention reads by.
    Queries have no such reason; counting for them too was no worse (docs/LOG.md), and leaves one
    factor for all, and for matrices that are several of these in one.

    waiting: paths by the name of each matrix. take: puts what it is given a way to make.
    """

    def __init__(self, model: PreTrainedModel, waiting: dict[str, list[str]], take: Take):
        self._model, self._waiting, self._take = model, waiting, take
        # Inputs, what each token counts, and their factor: queries, keys and values share theirs.
        self._last: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] | None = None
        # Which layer attends, to what, and how much to each of its tokens.
        self._attended: tuple[Any, Any, torch.Tensor] | None = None
        self._ahead = False

    def read(self, texts: Texts) -> torch.Tensor | None:
        """What the model's output matrix sees of them, [T, K], where that can be known."""
        hooks, attentions = [], set()
        for name, paths in self._waiting.items():
            for owner, child in (owner_of(self._model, path) for path in paths):
                if are_experts(owner):
                    hook = partial(self._quantise_experts, name, child)
                    hooks.append(owner.register_forward_pre_hook(hook))
                    continue
                hook = partial(self._quantise, name, owner)
                hooks.append(getattr(owner, child).register_forward_pre_hook(hook))
                if "Attention" in type(owner).__name__:  # as Transformers calls them
                    attentions.add(owner)
        for layer in attentions:
            hooks.append(layer.register_forward_pre_hook(self._look_ahead, with_kwargs=True))
        try:
            given = arguments(self._model, texts.ids, texts.sources)
            made: Any = self._model.base_model(**given, use_cache=False)
        finally:
            for handle in hooks:
                handle.remove()
        last: torch.Tensor | None = made.get("last_hidden_state")
        return None if last is None else last.flatten(0, -2)

    def _quantise(self, name: str, owner: Any, module: Any, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0]
        if self._ahead or x.numel() == 0:  # no token went to this expert
            return
        counts = None
        if self._attended is not None and self._attended[0] is owner and self._attended[1] is x:
            counts = self._attended[2]
        if self._last is None or self._last[0] is not x or self._last[1] is not counts:
            rows = x.flatten(0, -2)
            if counts is not None:
                rows = rows * counts.sqrt()[:, None]
            self._last = x, counts, factor(rows)
        seen = self._last[2]
        self._take(name, lambda weight: quantise4(weight, seen))
        # In this call it is the old module that computes.
        made: Any = self._model.get_submodule(self._waiting[name][0])
        weight = made.weight.T if isinstance(module, Conv1D) else made.weight
        module.weight = torch.nn.Parameter(weight, requires_grad=False)

    def _quantise_experts(
        self, name: str, child: str, module: Any, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        hidden, chosen, _ = inputs
        make = partial(quantise_experts, module, child, hidden=hidden, chosen=chosen)
        self._take(name, make)

    def _look_ahead(self, layer: Any, args: Any, options: dict[str, Any]) -> None:
        """See whom the layer attends to, before any of its matrices is quantised."""
        # XLM writes to its cache whether one is wanted or not.
        given = {**options, "cache": None} if "cache" in options else options
        self._ahead = True
        try:
            made = layer.forward(*args, **given)
        finally:
            self._ahead = False
        source = options.get("key_value_states", options.get("encoder_hidden_states"))
        if source is None:
            source = args[0] if args else options.get("hidden_states")
        counts = _attention_got(made)
        if counts is None or not isinstance(source, torch.Tensor):
            return
        if len(counts) == source[..., 0].numel():
            self._attended = layer, source, counts


def owner_of(model: PreTrainedModel, path: str) -> tuple[Any, str]:
    """What has the module or the parameter at this path, and under which name."""
    parent, _, child = path.rpartition(".")
    return model.get_submodule(parent), child


def _attention_got(made: Any) -> torch.Tensor | None:
    """The attention that each token gets in all, float32 [B S], of what a layer of attention gives
    back. Transformers' eager attention has its probabilities there, [B, H, N, S]; in that place
    others have a state, or nothing."""
    found = [part for part in made if isinstance(part, torch.Tensor) and part.dim() == 4]
    if not found or found[-1].min() < 0 or not found[-1].sum(-1).max() < 1.01:
        return None
    return found[-1].sum((1, 2), dtype=torch.float32).flatten()
