"""llama.cpp's model families in Transformers' terms: models, configuration fields, and names of
weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The properties that differ between families.

    rotates_neighbours: llama.cpp rotates pairs of neighbours, so the rows of queries and keys are
    in another order than in Transformers. keys: metadata keys in addition to `KEYS`. defaults:
    configuration fields that apply unless a key sets them. layer: names within a layer that differ
    from `LAYER`. stores_norms_plus_one: norms are stored with the 1 that Transformers' model adds.
    has_local_rope: layers with a window have a separate rotary embedding. has_partial_rope: the
    rotary embedding may cover a part of each head, with factors for its frequencies.
    largest_model_layers: the number of layers of the model whose scores are scaled by the square
    root of hidden_size / heads instead of the head's width, which no key specifies; None if the
    family has no such model.
    """

    model_type: str
    model_class: str
    rotates_neighbours: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    stores_norms_plus_one: bool = False
    has_local_rope: bool = False
    has_partial_rope: bool = False
    largest_model_layers: int | None = None


KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", rotates_neighbours=True),  # and Mistral
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        defaults={"norm_topk_prob": True},
        layer={
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.gate_proj",
            "ffn_up_exps": "mlp.experts.up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
        },
    ),
    # By default, both give the same layers a window.
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        keys={**_WINDOW, **_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
        layer=_GEMMA,
        stores_norms_plus_one=True,
        largest_model_layers=46,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys={**_WINDOW, **_CAP},
        defaults={"final_logit_softcapping": None},
        layer=_GEMMA,
        stores_norms_plus_one=True,
        has_local_rope=True,
        largest_model_layers=62,
    ),
    # The original has a sliding window, which llama.cpp itself ignores.
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        keys={
            **_WINDOW,
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        defaults={"sliding_window": None},
        layer={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        has_partial_rope=True,
    ),
    "granite": Family(
        "granite",
        "GraniteForCausalLM",
        rotates_neighbours=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    # By default, every fourth layer has no rotary embedding in both.
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", rotates_neighbours=True),
}
