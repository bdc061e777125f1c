"""The matrices of a model, quantised in place: what is traced afterwards is the quantised model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..decoder import NAME
from ..encoder import arguments
from .blocks import BLOCK, Bits, Quantised, Rows, bytes_of, quantise8, quantise_rows, recover
from .costs import NoCosts, costs, dearest
from .experts import QuantisedExperts, are_experts
from .feedback import factor, quantise4
from .inputs import Reader, owner_of
from .layers import put
from .quality import Said, Texts, silent
from .stored import parameter

Make = Callable[[torch.Tensor], Quantised | None]  # of a matrix [N, K]; None: it cannot

_OF_LAYERS = "embed_tokens_per_layer"  # of Gemma 3n and 4: what each layer adds for a token
_USUAL = (torch.nn.Linear.forward, Conv1D.forward)
# Texts that say what a matrix costs. Those that it was rounded by find an output matrix cheap.
_PROBED = 4


def quantise_model(
    model: PreTrainedModel,
    bits: Bits,
    texts: Texts | None = None,  # that the model wrote
    keep: bool = False,  # the levels of what lies on some already
    rows: Rows | None = None,  # what has 8 bits has a scale a row, and such levels
    said: Said = silent,  # hears how far it is
    most: float | None = None,  # bits a weight, which texts and 4 bits may take
    chose_not: Said = silent,  # hears why the output matrix has 8 bits, and nothing was chosen
) -> dict[str, Quantised]:
    """Quantise the model's matrices. A module is replaced as soon as its levels are chosen, so no
    dense copy of the model is made.

    By the name of the parameter (of `named_parameters`, where a tied one has the embedding's name):
    the weights of linear layers, the output matrix, tied or not, and other embeddings. Levels
    lie [N outputs, K inputs] for GPT-2's `Conv1D` too, whose weight is [K, N], and [E N, K] for
    experts, in float32. What decides between them (`_routes`) stays as it is.

    With texts, 4 bits are rounded with error feedback, by all but the last few of them. Every
    matrix sees its inputs as the quantised matrices before it make them: all are quantised in one
    pass, each when it is called. Then those get 8 bits that cost the model the most for it
    (`costs`, by the last texts), as many as there is room for: `most`, or what 8 bits for the
    output matrix would take, so that a step reads as many bytes. Experts do not, nor what has kept
    its levels, nor, without `most`, tables of which a row is looked up: they have 8 bits anyway.
    What is no mapped file's is held dense until then, so half precision, which has none, chooses
    with `most` alone. Where nothing can be chosen, the output matrix has 8 bits.
    Raises ValueError for NaN, infinity and what no float16 scale reaches, with the name; NoCosts
    with `most`.
    """
    matrices = _Matrices(model, said)
    places, ends = matrices.places, _ends(model, matrices.places)
    inner = [name for name in places if name not in ends]
    texts = texts if bits == 4 else None  # of 8 bits there is nothing to gain
    exact: dict[str, torch.Tensor] = {}  # what may get 8 bits yet

    def nearest(to: Bits) -> Make:
        if to == 8 and rows:
            return lambda weight: quantise_rows(weight, rows)
        return quantise8 if to == 8 else quantise4

    def choose(texts: Texts, last: torch.Tensor | None) -> None:
        """Which have 8 bits, when all have their levels. last: see `Reader.read`."""
        eight = [name for name in ends if name in exact]
        if most is None and (not eight or exact.keys() == {*eight}):
            return  # there is nothing to choose
        for name in eight:
            seen = last if name == ends[0] and _sees(model, last, texts) else None
            make = partial(quantise4, factor=None if seen is None else factor(seen))
            matrices.put(name, make, exact[name])
        more = {name: _more(matrices.found[name], rows) for name in exact}
        room: float = sum(more[name] for name in eight)
        if most is not None:
            made = matrices.found.values()
            room = most / 8 * sum(weight.levels.size for weight in made)
            room -= sum(weight.size for weight in made)
        layers = {name: {model.get_submodule(path) for path in places[name]} for name in exact}
        said("what each of them costs")
        try:
            eight = dearest(costs(model, exact, layers, texts[-_PROBED:]), more, room)
        except NoCosts as error:
            if most is not None:
                raise
            chose_not(str(error))
        for name in eight:
            matrices.put(name, nearest(8), exact[name])

    with torch.no_grad():
        # Levels of 8 bits are found again in blocks, which whole rows are not.
        for name in (*inner, ends[0]) if keep and not (rows and bits == 8) else ():
            matrices.take(name, lambda weight: recover(weight, bits))
        if texts is not None and (most is not None or rows is None):
            stay = {*matrices.found, *(ends[1:] if most is None else ())}
            exact = {
                name: _matrix(model, paths[0])
                for name, paths in places.items()
                if name not in stay and not are_experts(owner_of(model, paths[0])[0])
            }
        # The ends first, as the layers see the embedding. They may have 4 bits in the end.
        for name in ends:
            matrices.take(name, nearest(8))
        last = None
        if texts is not None:
            waiting = {name: places[name] for name in inner if name not in matrices.found}
            some = len(texts.ids) > _PROBED
            reader = Reader(model, waiting, matrices.take)
            last = reader.read(texts[:-_PROBED] if some else texts)
        for name in inner:  # no texts, or none that came by
            matrices.take(name, nearest(bits))
        if texts is not None:
            choose(texts, last)
    return matrices.found


class _Matrices:
    """Those of a model that are exchanged for quantised ones, and of which it has been done."""

    def __init__(self, model: PreTrainedModel, said: Said):
        self.places = _places(model)
        self.found: dict[str, Quantised] = {}
        self._model, self._said = model, said

    def take(self, name: str, make: Make) -> None:
        """Exchange it, if that is still to be done and `make` can."""
        if name not in self.found:
            self.put(name, make, _matrix(self._model, self.places[name][0]))

    def put(self, name: str, make: Make, weight: torch.Tensor) -> None:
        """Exchange it for what is made of `weight`, [N, K]."""
        try:
            made = make(weight)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if made is not None:
            self.found[name] = made
            for path in self.places[name]:
                _put(self._model, path, made)
            self._said(f"{len(self.found)} of {len(self.places)} matrices")


def _sees(model: PreTrainedModel, last: torch.Tensor | None, texts: Texts) -> bool:
    """Whether the output matrix multiplies what the layers give last, [T, K] of all texts, or that
    times a number: some models have another layer between."""
    if last is None:
        return False
    seen: list[torch.Tensor] = []
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    hook = output.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        model(**arguments(model, texts[:1].ids, texts[:1].sources), use_cache=False)
    finally:
        hook.remove()
    if not seen or seen[0].shape[-1] != last.shape[-1]:
        return False
    x = seen[0].flatten(0, -2)
    alike = torch.nn.functional.cosine_similarity(x.float(), last[: len(x)].float(), dim=-1)
    return bool(alike.mean() > 0.99)


def _more(weight: Quantised, rows: Rows | None) -> int:
    """Bytes that 8 bits take more than the 4 that it has; of rows of 33 and 34 it is none."""
    count, columns = weight.levels.shape
    width = columns if rows and columns > BLOCK else BLOCK
    return max(1, bytes_of(count, columns, 8, width) - weight.size)


def least(model: PreTrainedModel) -> float:
    """Bits a weight where all have 4: half a bit more for scales, and what fills blocks up."""
    shapes = [_matrix(model, path).shape for path, *_ in _places(model).values()]
    size = sum(bytes_of(rows, columns, 4) for rows, columns in shapes)
    return 8 * size / sum(shape.numel() for shape in shapes)


def requantise(model: PreTrainedModel, weights: dict[str, Quantised]) -> None:
    """Give another copy of a model the weights that `quantise_model` found."""
    for name, paths in _places(model).items():
        for path in paths if name in weights else ():
            _put(model, path, weights[name])


def _put(model: PreTrainedModel, path: str, weight: Quantised) -> None:
    module, child = owner_of(model, path)
    if not are_experts(module):
        put(model, path, weight)
        return
    experts = len(getattr(module, child))
    delattr(module, child)
    setattr(module, child, QuantisedExperts(weight, experts))
    module.config._experts_implementation = NAME  # no other can multiply by it


def _ends(model: PreTrainedModel, places: Iterable[str]) -> list[str]:
    """The output matrix, the embedding, and one for all layers, by the names of `_places`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    both: list[Any] = [model.get_output_embeddings(), model.get_input_embeddings()]  # type: ignore[no-untyped-call]
    ends = [names[id(parameter(module))] for module in both]
    ends += [name for name in places if _OF_LAYERS in name]
    return [name for name in dict.fromkeys(ends) if name in places]


def _places(model: PreTrainedModel) -> dict[str, list[str]]:
    """By the name of each parameter to quantise the paths of the modules that have it, or its own
    where it is one of experts."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[no-untyped-call]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # DeepSeek 4 has one that multiplies in groups.
        linear = getattr(type(module), "forward", None) in _USUAL and not _routes(model, path)
        # Of an encoder-decoder there are several with the one table.
        table = isinstance(module, torch.nn.Embedding) and (
            parameter(module) is parameter(embedding) or path.endswith(_OF_LAYERS)
        )
        if linear or table:
            places.setdefault(names[id(parameter(module))], []).append(path)
        # In half precision, which is for TensorRT, they stay as they are.
        if are_experts(module) and model.dtype == torch.float32:
            for name, weight in module.named_parameters(recurse=False):
                if weight.dim() == 3:
                    places.setdefault(names[id(weight)], []).append(f"{path}.{name}")
    return places


def _routes(model: PreTrainedModel, path: str) -> bool:
    """Whether this linear layer decides between experts, by small differences; it is next to no
    bytes. The nearest module around it that has experts, which are weights of three dimensions, has
    one for each of its outputs; or it has a single output, for the experts that are always asked.
    """
    layer: Any = model.get_submodule(path)
    while path:
        path = path.rpartition(".")[0]
        experts = {len(weight) for weight in expert_weights(model.get_submodule(path))}
        if experts:
            return len(parameter(layer)) in experts | {1}
    return False


def expert_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Those of a layer's experts, [E, ..] together."""
    return [
        weight
        for module in model.modules()
        if not isinstance(module, torch.nn.Conv1d)
        for weight in module.parameters(recurse=False)
        if weight.dim() == 3
    ]


def _matrix(model: PreTrainedModel, path: str) -> torch.Tensor:
    """[N, K], of experts [E N, K], in the type that it is stored in."""
    owner, child = owner_of(model, path)
    module = getattr(owner, child)
    weight: torch.Tensor
    if are_experts(owner):
        weight = (module.transpose(1, 2) if owner.is_transposed else module).flatten(0, 1)
    else:
        weight = parameter(module).T if isinstance(module, Conv1D) else parameter(module)
    return weight
