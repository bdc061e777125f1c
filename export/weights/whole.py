"""The matrices of a model, quantised in place: what is traced afterwards is the quantised model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .blocks import Bits, Quantised, quantise

# The last part of a module's name. A router decides between experts, by small differences; it is
# next to no bytes.
_ROUTERS = ("gate", "router")


def quantise_model(model: PreTrainedModel, bits: Bits) -> dict[str, Quantised]:
    """Quantise the model's matrices and write what they are then, `dense()`, into its parameters.

    By the name of the parameter (of `named_parameters`, where a tied one has the embedding's name):
    the weights of linear layers and the output matrix, tied or not, and an untied embedding at 8
    bits. Levels lie [N outputs, K inputs] for GPT-2's `Conv1D` too, whose weight is [K, N]. Routers
    of experts, and what is not two-dimensional, stay as they are.
    Raises ValueError for NaN, infinity and what no float16 scale reaches, with the name.
    """
    found = {}
    for name, (module, chosen) in matrices(model, bits).items():
        try:
            found[name] = quantise(weight_of(module).numpy(), chosen)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        write_back(module, found[name])
    return found


def matrices(model: PreTrainedModel, bits: Bits) -> dict[str, tuple[Any, Bits]]:
    """By the parameter's name the module that reads it, and its bits."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()  # type: ignore[no-untyped-call]
    found: dict[str, tuple[Any, Bits]] = {}
    for path, module in model.named_modules():
        routes = path.endswith(_ROUTERS) and module is not output
        if isinstance(module, torch.nn.Linear | Conv1D) and not routes:
            found[names[id(module.weight)]] = module, bits
    found.setdefault(names[id(embedding.weight)], (embedding, 8))
    return found


def weight_of(module: Any) -> torch.Tensor:
    """float32 [N, K]."""
    weight: torch.Tensor = module.weight.detach()
    return (weight.T if isinstance(module, Conv1D) else weight).float().contiguous()


def write_back(module: Any, quantised: Quantised) -> None:
    dense = torch.from_numpy(quantised.dense())
    module.weight.data.copy_(dense.T if isinstance(module, Conv1D) else dense)
