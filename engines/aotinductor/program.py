"""Adapt an exported program to a GPU, where time goes into launches and memory traffic.

The exporter's program is the same for every backend. This module traces it again with other
operators, in places where a GPU would otherwise run more kernels, move more bytes, or be tuned to
the sizes of the example inputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from operator import getitem
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch


def adapt_to_gpu(
    program: torch.export.ExportedProgram, capacity: int
) -> tuple[torch.export.ExportedProgram, dict[str, list[str]]]:
    """The program with S = capacity, `_attention` in place of torch's, logits in the type that they
    are computed in, and matrices that multiply the same input joined into one; and for each joined
    matrix the names of its parts.

    If S stayed dynamic, its hint would be the example's 16 rows: Inductor would size every
    reduction over S by them, and choose torch's attention kernel by them. Converting the logits to
    float32 would write, read and write them again for nothing: the sampling kernel reads all types.
    """
    import torch

    assert program.example_inputs is not None
    (ids, position, index, *sides), _ = program.example_inputs
    caches = [
        [cache.new_zeros(len(cache), cache.shape[1], capacity, cache.shape[3]) for cache in side]
        for side in sides
    ]
    module, attention = program.module(), torch.ops.aten.scaled_dot_product_attention.default
    assert isinstance(module, torch.fx.GraphModule)
    shared: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.find_nodes(op="call_function", target=attention):
        query, key, value, mask = cast(tuple[torch.fx.Node, ...], node.args)
        if mask not in shared:
            with module.graph.inserting_before(node):
                shared[mask] = module.graph.call_function(_prepare_mask, (mask, query, key))
        node.target, node.args = _attention, (query, key, value, shared[mask])
    _replace_outer_products(module.graph)
    _drop_logits_conversion(module.graph)
    joined = _join_matrices(module, program.state_dict)
    module.recompile()
    slots, tokens, outputs = (torch.export.Dim(name) for name in ("slots", "tokens", "outputs"))
    open_sizes = ({0: slots, 1: tokens}, {0: slots}, {0: outputs})
    retraced = torch.export.export(
        module, (ids, position, index, *caches),
        dynamic_shapes=(*open_sizes, *([{0: slots} for _ in side] for side in caches)),
        # torch cannot prove the strides of a product for every N.
        strict=False, prefer_deferred_runtime_asserts_over_guards=True,
    )  # fmt: skip
    return retraced, joined


def _replace_outer_products(graph: torch.fx.Graph) -> None:
    """Replace matrix products whose inner dimension is 1 by element-wise products. Some versions of
    Transformers compute the angles of rotary embeddings that way: cuBLAS would spend a launch on
    them, and round them to TF32 where that is allowed, as PyTorch images do."""
    import torch

    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default):
        summed = node.args[0].meta["val"].shape[-1]
        if isinstance(summed, int) and summed == 1:
            node.target = torch.ops.aten.mul.Tensor


def _drop_logits_conversion(graph: torch.fx.Graph) -> None:
    """Drop the conversion to float32 at the end of the graph's only output."""
    import torch

    (results,) = graph.output_node().args
    (result,) = torch.utils._pytree.tree_leaves(results)
    if result.target is torch.ops.aten.to.dtype and result.args[1] == torch.float32:
        graph.output_node().replace_input_with(result, result.args[0])
        graph.eliminate_dead_code()


def _join_matrices(
    module: torch.fx.GraphModule, parameters: dict[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Join matrices that multiply the same vector, such as those of queries, keys and values: they
    are stacked into one new parameter. The originals are removed from `parameters`, which the
    module was made from, so that only few of them exist twice at a time.

    For one token, a product with a small matrix is bound by its launch, not by its bytes.
    """
    import torch

    graph, linear = module.graph, torch.ops.aten.linear.default
    split, joined = torch.ops.aten.split_with_sizes.default, dict[str, list[str]]()
    groups: dict[tuple[object, ...], list[Any]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=linear):
        vector, *arguments = cast(tuple[Any, ...], node.args)
        # Skip tied matrices, which have other readers, and tensors that the graph itself made.
        if all(
            argument.op == "get_attr" and len(argument.users) == 1 and argument.target in parameters
            for argument in arguments
        ):
            tensors = [_attribute(module, argument.target) for argument in arguments]
            if tensors[0].dim() == 2:
                groups[vector, *(tensor.dtype for tensor in tensors)].append(node)
            del tensors
    for nodes in groups.values():
        if len(nodes) == 1:
            continue
        with graph.inserting_before(nodes[0]):
            joined_nodes = []
            for parts in zip(*(node.args[1:] for node in nodes), strict=True):
                name, names = f"joined_{len(joined)}", [part.target for part in parts]
                tensors = [_attribute(module, argument) for argument in names]
                sizes = [len(tensor) for tensor in tensors]
                module.register_parameter(name, torch.nn.Parameter(torch.cat(tensors), False))
                joined_nodes.append(graph.get_attr(name))
                joined[name] = names
                del tensors
            product = graph.call_function(linear, (nodes[0].args[0], *joined_nodes))
            pieces = graph.call_function(split, (product, sizes, -1))
        for index, node in enumerate(nodes):
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(getitem, (pieces, index)))
            _, *arguments = node.args
            graph.erase_node(node)
            for part in arguments:
                graph.erase_node(part)
                del parameters[part.target]
                owner, _, attribute = part.target.rpartition(".")
                delattr(module.get_submodule(owner), attribute)
    return joined


def _attribute(module: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, own = name.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), own)
    return tensor


def _prepare_mask(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What all attentions with this mask share: first the mask itself."""
    import torch

    if not (_runs_triton(mask) and mask.dtype == torch.bool and mask.shape[1] == 1):
        return (mask,)
    from . import attention as kernel

    whole = mask.expand(query.shape[0], 1, query.shape[2], key.shape[2])
    return kernel.spans(whole.clone(memory_format=torch.contiguous_format))


def _attention(
    query: torch.Tensor,  # [B, H, N, D]
    key: torch.Tensor,  # [B, Hkv, S, D]
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    masks: tuple[torch.Tensor, ...],  # of `_prepare_mask`
    *,
    scale: float,
    enable_gqa: bool,
) -> torch.Tensor:
    """One kernel where it supports the shapes, otherwise two products; [B, H, N, Dv]."""
    if len(masks) > 1:
        from . import attention as kernel

        if kernel.supports(query, key, value):
            out: torch.Tensor = kernel.attention(query, key, value, *masks, scale)
            return out
    return _products(query, key, value, masks[0], scale)


def _runs_triton(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _products(
    query: torch.Tensor,  # [B, H, N, D]
    key: torch.Tensor,  # [B, Hkv, S, D]
    value: torch.Tensor,  # [B, Hkv, S, Dv]
    attn_mask: torch.Tensor,  # bool [B, 1, N, S], or added to the scores [B, H, N, S]
    scale: float,
) -> torch.Tensor:
    """Attention as two batched products in the caches' own type, softmax in float32; [B, H, N, Dv].

    The heads that share keys become rows of one product. Keys and values are then not copied for
    each head and in float32, as torch's own products do. Everything computed between the products
    keeps their shape, with tokens before heads: otherwise Inductor, which cannot tell that a view
    with dynamic sizes needs no copy, copies the queries and the weights.
    """
    (batch, heads, count, _), (_, kv_heads, rows, _) = query.shape, key.shape
    groups = heads // kv_heads

    def merge_heads(tensor: torch.Tensor) -> torch.Tensor:  # takes [B, Hkv, N, H / Hkv, ...]
        return tensor.reshape(batch * kv_heads, count * groups, -1)

    # Apply a power of two, which rounds nothing, before the product: float16 overflows above
    # 65,504. At most the usual scale's, as GPT-Neo has none.
    power = 2.0 ** math.floor(math.log2(min(scale, query.shape[3] ** -0.5)))
    queries = merge_heads(query.view(batch, kv_heads, groups, count, -1).transpose(2, 3)) * power
    scores = queries.bmm(key.flatten(0, 1).transpose(1, 2)).float() * (scale / power)
    if attn_mask.is_floating_point():
        bias = attn_mask.view(batch, kv_heads, groups, count, rows)
        scores = scores + merge_heads(bias.transpose(2, 3))
    else:
        seen = attn_mask[:, :, :, None].expand(batch, kv_heads, count, groups, rows)
        scores = scores.masked_fill(merge_heads(~seen), float("-inf"))
    weights = scores.softmax(-1).to(value.dtype)
    values = weights.bmm(value.flatten(0, 1)).view(batch, kv_heads, count, groups, -1)
    return values.transpose(2, 3).reshape(batch, heads, count, -1)
