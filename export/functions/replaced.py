"""What is replaced in Transformers and torch while a model is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from . import complex_numbers, older_layers, stateful_layers


@contextmanager
def patched_layers(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, the model's layers call our functions instead of Transformers', which are
    found by name, and real tensors stand for complex ones."""
    kinds = {type(module) for module in model.modules()}
    with ExitStack() as replaced:
        for module in {sys.modules[kind.__module__] for kind in kinds}:
            functions = stateful_layers.REPLACEMENTS
            for name in functions.keys() & vars(module).keys():
                replaced.enter_context(patch.object(module, name, functions[name]))
        for kind in kinds:
            if kind.__name__ in older_layers.REPLACEMENTS:
                method, ours = older_layers.REPLACEMENTS[kind.__name__]
                replaced.enter_context(patch.object(kind, method, ours))
        for name, function in complex_numbers.REPLACEMENTS.items():
            replaced.enter_context(patch.object(torch, name, function))
        yield
