"""Attention layers of Transformers that are older than its attention interface, made to call it.

Each replacement takes the place of one method, and computes what that method does around attention.
The positions of MPT and BLOOM are biases on the scores, a slope per head times the distance: ALiBi
(Press et al., 2022, arXiv 2108.12409, section 3).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .own import IMPLEMENTATION
from .stateful_layers import UnsupportedArchitecture

# What a layer returns: its output, and attention weights, which are not kept.
Output = tuple[torch.Tensor, None]


def _attend(layer: Any, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    """The interface's attention: inputs are query, key, value [B, H, N or S, D] and the mask bool
    [B, 1, N, S]; the result is [B, N, H, D]."""
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](layer, *inputs, **options)[0]
    return output


def _function(layer: Any, name: str) -> Callable[..., Any]:
    """The function of this name in the layer's module."""
    found: Callable[..., Any] = vars(sys.modules[type(layer).__module__])[name]
    return found


def _by_heads(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> Output:
    # CodeGen's rotation leaves queries in float32.
    return _apart(_attend(layer, query.to(key.dtype), key, value, mask)), None


def _gpt_neo(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> Output:
    """Scores are not scaled, and every other layer has a window."""
    if layer.attention_type == "local":
        mask = mask & (_distances(mask) < layer.config.window_size)
    return _apart(_attend(layer, query, key, value, mask, scaling=1.0)), None


def _apart(output: torch.Tensor) -> torch.Tensor:
    """From [B, N, H, D] to [B, H, N, D]. Contiguous in a program of torch, which would otherwise
    say that joining the heads takes no copy; that depends on the implementation of attention."""
    heads = output.transpose(1, 2)
    return heads if torch.onnx.is_in_onnx_export() else heads.contiguous()


def _distances(mask: torch.Tensor) -> torch.Tensor:
    """How far before each query a row is, int64 [B, 1, N, S]. A query sees all rows up to its own,
    so their number is its position."""
    positions = mask.sum(dim=3, keepdim=True) - 1
    return positions - torch.arange(mask.shape[3], device=mask.device)


def _attend_with_alibi(
    layer: Any, slopes: torch.Tensor, query: torch.Tensor, *rows: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`_attend` with a slope for each head, [H, 1, 1]. The biases of BLOOM and MPT themselves
    differ by a number for each query, to which softmax is blind."""
    bias = -slopes * _distances(rows[-1])  # [B, H, N, S]
    return _attend(layer, query, *rows, scaling=scaling, position_bias=bias.to(query.dtype))


def _bloom(
    layer: Any,
    hidden_states: torch.Tensor,  # [B, N, H D]
    residual: torch.Tensor,
    *,
    attention_mask: torch.Tensor,
    layer_past: Any,
    **_: Any,
) -> Output:
    query, key, value = layer._reshape(layer.query_key_value(hidden_states))
    key, value = layer_past.update(key, value, layer.layer_idx)
    slopes = _function(layer, "_get_alibi_slopes")(layer.num_heads, query.device)
    rows = query, key, value, attention_mask
    output = _attend_with_alibi(layer, slopes[:, None, None], *rows, scaling=layer.inv_norm_factor)
    return residual + layer.dense(output.flatten(2)), None


def _falcon(
    layer: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor,
    layer_past: Any,
    position_embeddings: Any,
    **_: Any,
) -> Output:
    if alibi is not None:  # its eager attention adds the bias twice, the default one once
        raise UnsupportedArchitecture("its ALiBi differs between Transformers' implementations")
    # Not by its own method, which repeats keys and values for each head that reads them.
    sizes = (layer.num_kv_heads, -1, layer.head_dim)
    mixed = layer.query_key_value(hidden_states).unflatten(2, sizes)  # [B, N, Hkv, H / Hkv + 2, D]
    split = mixed[:, :, :, :-2].flatten(2, 3), mixed[:, :, :, -2], mixed[:, :, :, -1]
    query, key, value = (heads.transpose(1, 2) for heads in split)
    query, key = _function(layer, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, layer.layer_idx)
    return layer.dense(_attend(layer, query, key, value, attention_mask).flatten(2)), None


def _mpt(
    layer: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,  # [H, 1, maximum length], for the last query
    past_key_values: Any,
    attention_mask: torch.Tensor,
    **_: Any,
) -> Output:
    mixed = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        mixed = mixed.clamp(-layer.clip_qkv, layer.clip_qkv)
    query, key, value = (
        each.unflatten(2, (layer.n_heads, -1)).transpose(1, 2) for each in mixed.chunk(3, dim=2)
    )
    key, value = past_key_values.update(key, value, layer.layer_idx)
    slopes, rows = -position_bias[:, :, -2:-1], (query, key, value, attention_mask)
    output = _attend_with_alibi(layer, slopes, *rows, scaling=layer.softmax_scale)
    return layer.out_proj(output.flatten(2)), None


def _xglm(
    layer: Any,
    hidden_states: torch.Tensor,
    past_key_values: Any,
    attention_mask: torch.Tensor,
    **_: Any,
) -> Output:
    query, key, value = (
        project(hidden_states).unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    key, value = past_key_values.update(key, value, layer.layer_idx)
    return layer.out_proj(_attend(layer, query, key, value, attention_mask).flatten(2)), None


def _xglm_positions(layer: Any, position_ids: torch.Tensor, _: int) -> torch.Tensor:
    """Without making a longer table, which would depend on N."""
    rows: torch.Tensor = layer.weights[position_ids + layer.offset]
    return rows


# By the names of the layers' classes: the method, and what replaces it.
REPLACEMENTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _by_heads),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _by_heads),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _by_heads),
    "MptAttention": ("forward", _mpt),
    "XGLMAttention": ("forward", _xglm),
    "XGLMSinusoidalPositionalEmbedding": ("forward", _xglm_positions),
}


def simplify(model: torch.nn.Module) -> None:
    """Make Falcon's products ordinary ones. They are the same, except that in half precision they
    round before they add a bias."""
    for module in model.modules():
        if type(module).__name__ == "FalconLinear":
            module.__class__ = torch.nn.Linear


# Fields of MPT's configuration that its own code follows and Transformers ignores, with the values
# that Transformers assumes.
_ASSUMED = {
    "alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False, "logit_scale": None,
}  # fmt: skip


def ignored_field(config: Any) -> str | None:
    """A field and its value, if the checkpoint's model is not the one that Transformers runs."""
    if config.model_type != "mpt":
        return None
    fields = {**vars(config.attn_config), "logit_scale": config.logit_scale}
    differing = (name for name, assumed in _ASSUMED.items() if fields[name] != assumed)
    return next((f"{name} = {fields[name]}" for name in differing), None)


def are_in(model: torch.nn.Module) -> bool:
    """Whether the model has such layers, which take positions from its `position_ids` or mask."""
    return any(type(module).__name__ in REPLACEMENTS for module in model.modules())
