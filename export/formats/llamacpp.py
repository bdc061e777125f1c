"""What llama.cpp's keys and names mean to Transformers: configuration, weights and tokenizer.

What a file says and this table does not know is refused by name: a factor that is silently left out
is another model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping as vocabularies
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.files.errors import OutriderError, first_line

from .gguf import GgufFile
from .packed import Lazy, Packed, Reordered, damaged, take


@dataclass(frozen=True)
class _Family:
    """rotated: llama.cpp's rotation takes neighbours for pairs, so rows of queries and keys lie in
    another order than Transformers'."""

    model_type: str
    head: str
    rotated: bool = False


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", rotated=True),  # and Mistral
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
}
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
_KNOWN = {*_FIELDS, "vocab_size", "rope.freq_base"}
_WIDTHS = ("rope.dimension_count", "attention.value_length")  # those of a head, or not carried
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
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
_FACTORS = "rope_freqs.weight"


def packed(name: str, file: GgufFile) -> tuple[PretrainedConfig, Packed]:
    """Raises OutriderError "architecture" for a family that is not in the table, "checkpoint" for
    a file that says what cannot be carried over."""
    architecture = str(file.metadata["general.architecture"])
    if architecture not in _FAMILIES:
        raise OutriderError(
            "architecture",
            f"{name} is a GGUF file of {architecture!r}; read are {', '.join(_FAMILIES)}",
            "Use the checkpoint that it was made from, in the Hugging Face layout.",
        )
    family = _FAMILIES[architecture]
    config = _config(name, file, family, architecture)

    def tensors() -> dict[str, Lazy]:
        return {
            _renamed(key): _turned(key, tensor, config) if family.rotated else tensor
            for key, tensor in file.tensors.items()
            if key != _FACTORS
        }

    return config, Packed("GGUF", file.bits, " and ".join(file.kinds[:3]), tensors)


def _config(name: str, file: GgufFile, family: _Family, architecture: str) -> PretrainedConfig:
    said = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    fields = {field: said[key] for key, field in _FIELDS.items() if key in said}
    needed = set(_FIELDS.values()) - {"num_key_value_heads", "head_dim"}
    if missing := sorted(needed - fields.keys()):
        raise damaged(name, f"its metadata lacks {missing[0]}")
    heads = fields["num_attention_heads"]
    theta = said.get("rope.freq_base", 10_000.0)
    if not all(type(value) in (int, float) and value > 0 for value in (*fields.values(), theta)):
        raise _not_carried(name, "sizes that differ from layer to layer, or are none")
    fields.setdefault("head_dim", fields["hidden_size"] // heads)
    fields.setdefault("num_key_value_heads", heads)
    whole = dict.fromkeys(_WIDTHS, fields["head_dim"])
    for key, value in said.items():
        if value not in ((whole[key],) if key in whole else (0, "", "none")) and key not in _KNOWN:
            raise _not_carried(name, f"{architecture}.{key} = {str(value)[:40]}")
    rope = {"rope_type": "default", "rope_theta": theta}
    embedding = take(name, dict(file.tensors), "token_embd.weight")
    named = file.tensors.keys()
    ends = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    config: PretrainedConfig
    try:
        config = AutoConfig.for_model(
            family.model_type,
            **fields,
            vocab_size=embedding.shape[0],  # of which the vocabulary may fill less
            rope_parameters=rope,
            tie_word_embeddings="output.weight" not in named,
            attention_bias="blk.0.attn_q.bias" in named,
            mlp_bias="blk.0.ffn_up.bias" in named,
            architectures=[family.head],
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=[file.metadata[key] for key in ends if key in file.metadata] or None,
            pad_token_id=None,
        )
    except Exception as error:  # noqa: BLE001 - each configuration class validates in its own way
        raise damaged(name, f"its metadata is no configuration: {first_line(error)}") from None
    if _FACTORS in named:
        _take_factors(name, config, file.tensors[_FACTORS][...])
    return config


def _take_factors(name: str, config: PretrainedConfig, factors: torch.Tensor) -> None:
    """llama.cpp writes Llama 3's rotary embedding as what divides each frequency."""
    plain = config.rope_parameters
    theta, width = plain["rope_theta"], config.head_dim
    if factors.shape != (width // 2,) or not bool((factors.isfinite() & (factors > 0)).all()):
        raise damaged(name, f"{_FACTORS} is no factor for each of {width // 2} frequencies")
    config.rope_parameters = {
        **plain,
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    ours, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    theirs = theta ** -(torch.arange(0, width, 2) / width) / factors
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4, atol=0):
        raise _not_carried(name, f"{_FACTORS} other than Llama 3's")


def _not_carried(name: str, what: str) -> OutriderError:
    return OutriderError(
        "checkpoint",
        f"{name} says what would be lost: {what}",
        "Use the checkpoint that it was made from, in the Hugging Face layout.",
    )


def _renamed(key: str) -> str:
    """Transformers' name; of what has none the old one, which the model then does not take."""
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", key):
        number, part, last = layer.groups()
        return f"model.layers.{number}.{_LAYER[part]}.{last}" if part in _LAYER else key
    part, _, last = key.rpartition(".")
    return f"{_TENSORS[part]}.{last}" if part in _TENSORS else key


def _turned(key: str, tensor: Lazy, config: PretrainedConfig) -> Lazy:
    """Rows 2 i and 2 i + 1 of a head become i and i + width / 2."""
    part = key.split(".")[-2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    if heads is None:
        return tensor

    def make() -> Reordered:
        pairs = torch.arange(tensor.shape[0]).view(heads, -1, 2)
        return Reordered(tensor.stored(), pairs.transpose(1, 2).flatten())

    return Lazy(make, tensor.shape, tensor.dtype)


# Byte-level vocabularies whose texts are cut as GPT-2's, and those that have digits cut as well.
_GPT2_SPLIT = {"gpt-2", "phi-2", "mpt", "olmo", "jais"}
_DIGITS_SPLIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}


def tokenizer(name: str, file: GgufFile) -> PreTrainedTokenizerFast:
    """The file's own, with its chat template. Raises OutriderError "checkpoint" where the way of
    cutting texts into tokens is not known."""
    architecture, parts, options = vocabularies.get_gguf_tokenizer(str(file.path))
    cut = parts.get("pre_tokenizer_type")
    known = _GPT2_SPLIT | _DIGITS_SPLIT | vocabularies.GGUF_PRE_TOKENIZER_SPLITS.keys()
    if parts.get("tokenizer_type") == "gpt2" and cut not in known:
        raise OutriderError(
            "checkpoint",
            f"{name} cuts texts in a way that is not known: tokenizer.ggml.pre = {cut!r}",
            "Put the file into a folder with its original's tokenizer.json, and give the folder.",
        )
    backend, _ = vocabularies.convert_gguf_tokenizer(architecture, parts)
    if cut in _DIGITS_SPLIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    made: PreTrainedTokenizerFast
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **options)  # type: ignore[no-untyped-call]
    return made
