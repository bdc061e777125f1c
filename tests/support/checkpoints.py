"""Tiny random checkpoints of many architectures.

Nothing is downloaded. A checkpoint has two layers of 64 units and the byte tokenizer below. Its
weights are larger than a freshly initialised model's, so that its argmax changes from token to
token; its biases and norms are random too, so that a lost one changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

EOS = "</s>"
TOKENS = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]  # 257: EOS and one for each byte
VOCAB_SIZE = len(TOKENS)
CONTEXT = 256
FORCED = 5  # mBART's forced first token, which follows the start token
FEATURES = (8, 16)  # mel bands and frames of the Whisper encoder's input
WINDOW = 12  # sliding window of every architecture that has one

torch.set_num_threads(1)  # more only slow such small models down, and test workers share the cores


def _like(common: dict[str, Any], cls: type[PretrainedConfig], **own: Any) -> Architecture:
    """Return a function from overrides to a configuration."""
    return lambda **overrides: cls(**{**common, **own, **overrides})


def _qwen_vl(**overrides: Any) -> PretrainedConfig:
    """Each of its positions has three parts: text, image row and image column."""
    rope = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {**_LLAMA, "rope_parameters": rope, **overrides}
    sees = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config={**sees, "out_hidden_size": 64}, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip


Architecture = Callable[..., PretrainedConfig]
_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_LONG = {**_SIZES, "max_position_embeddings": CONTEXT}
_LLAMA = {**_IDS, **_LONG, "intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": 0}
_llama = partial(_like, _LLAMA)
# Architectures older than Llama. Most have their own names for the same sizes.
_gpt = partial(_like, _IDS)
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}

_STARTED = {**_IDS, "pad_token_id": 0, "decoder_start_token_id": 1}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "initializer_factor": 0.1}
_BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
}  # fmt: skip
_t5 = partial(_like, {**_STARTED, **_T5, "num_heads": 4})
_bart = partial(_like, {**_STARTED, **_BART, "max_position_embeddings": CONTEXT})

# Untied: with embeddings scaled by sqrt(64) a tied random Gemma only repeats its input.
_GEMMA = {"head_dim": 16, "tie_word_embeddings": False}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _rope(kind: str, original: int, **own: Any) -> dict[str, Any]:
    of_it = {"rope_theta": 1e4, "rope_type": kind, "original_max_position_embeddings": original}
    return {"rope_parameters": {**of_it, **own}}


def _t5gemma(**overrides: Any) -> PretrainedConfig:
    """Encoder and decoder are Gemma 2, each with both sliding and full attention layers."""
    part = {
        **_LLAMA, **_MIXED, "head_dim": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.2,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
    }  # fmt: skip
    return transformers.T5GemmaConfig(
        encoder=part, decoder=part, tie_word_embeddings=False, **{**_STARTED, **overrides}
    )


def _gemma4(num_hidden_layers: int = 4, **overrides: Any) -> PretrainedConfig:
    """All features of the Gemma 4 family in one model: every other layer has wider heads and uses
    its keys as values; the last two layers read the caches of the two before; per-layer embeddings;
    experts."""
    kinds = ["sliding_attention", "full_attention"] * 2
    return transformers.Gemma4TextConfig(**{
        **_LLAMA, **_GEMMA, **_EXPERTS, "layer_types": kinds[-num_hidden_layers:],
        "num_hidden_layers": num_hidden_layers, "sliding_window": WINDOW,
        "num_kv_shared_layers": 2 if num_hidden_layers == 4 else 0, "global_head_dim": 32,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "final_logit_softcapping": 4.0, **overrides,
    })  # fmt: skip


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _llama(transformers.LlamaConfig, tie_word_embeddings=True),
    "llama3": _llama(
        transformers.LlamaConfig,
        **_rope("llama3", 64, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "mistral": _llama(transformers.MistralConfig, sliding_window=WINDOW),
    "qwen2": _llama(transformers.Qwen2Config),
    "qwen3": _llama(transformers.Qwen3Config, head_dim=16),
    "gemma": _llama(transformers.GemmaConfig, **_GEMMA),
    "gemma2": _llama(
        transformers.Gemma2Config, **_GEMMA, **_MIXED, query_pre_attn_scalar=16,
        # Low enough to affect scores and logits of this size.
        attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
    ),
    "gemma3": _llama(
        transformers.Gemma3TextConfig, **_GEMMA, **_MIXED, query_pre_attn_scalar=16
    ),
    "gemma3n": _llama(
        transformers.Gemma3nTextConfig, **_GEMMA, **_MIXED, activation_sparsity_pattern=[0.95, 0.0],
        num_kv_shared_layers=0, vocab_size_per_layer_input=VOCAB_SIZE, altup_num_inputs=2,
        hidden_size_per_layer_input=16, laurel_rank=8,
    ),
    "gemma4": _gemma4,
    "phi": _llama(transformers.PhiConfig),
    "phi3": _llama(
        transformers.Phi3Config, original_max_position_embeddings=CONTEXT, resid_pdrop=0.0
    ),
    "phi3-longrope": _llama(
        transformers.Phi3Config, original_max_position_embeddings=CONTEXT // 2,
        **_rope("longrope", CONTEXT // 2, short_factor=[1.5] * 8, long_factor=[4.0] * 8),
    ),
    "llama-dynamic": _llama(transformers.LlamaConfig, **_rope("dynamic", 32, factor=2.0)),
    "gpt2": _gpt(transformers.GPT2Config, **_GPT2),
    "opt": _gpt(
        transformers.OPTConfig, **_LONG, word_embed_proj_dim=64, ffn_dim=96, pad_token_id=0
    ),
    "gpt-neox": _gpt(transformers.GPTNeoXConfig, **_LONG, intermediate_size=96),
    "olmo": _llama(transformers.OlmoConfig),  # its norms have no weights
    "olmo2": _llama(transformers.Olmo2Config),
    "stablelm": _llama(transformers.StableLmConfig),
    "granite": _llama(transformers.GraniteConfig),
    "cohere": _llama(transformers.CohereConfig),
    "smollm3": _llama(transformers.SmolLM3Config),
    "starcoder2": _llama(transformers.Starcoder2Config, sliding_window=WINDOW),
    "mixtral": _llama(transformers.MixtralConfig, num_local_experts=4),
    "qwen3-moe": _llama(
        transformers.Qwen3MoeConfig, head_dim=16, num_experts=4, **_EXPERTS
    ),
    "deepseek3": _llama(
        transformers.DeepseekV3Config, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, **_EXPERTS,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "deepseek2": _llama(
        transformers.DeepseekV2Config, num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, n_shared_experts=1, **_EXPERTS,
        first_k_dense_replace=1, n_group=2, topk_group=1, topk_method="group_limited_greedy",
        **_rope("yarn", 64, factor=40.0, mscale=0.7, mscale_all_dim=0.7),
    ),
    "phi-moe": _llama(
        transformers.PhimoeConfig, num_local_experts=4, num_experts_per_tok=2, attention_bias=True,
        original_max_position_embeddings=CONTEXT,
        **_rope("longrope", CONTEXT, short_factor=[1.2] * 8, long_factor=[4.0] * 8,
                short_mscale=1.2, long_mscale=1.3),
    ),
    "gpt-oss": _llama(
        transformers.GptOssConfig, num_local_experts=4, num_experts_per_tok=2, head_dim=16,
        **_MIXED, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    ),
    "qwen2.5-vl": _qwen_vl,
    # Recurrent layers: gated delta rule, convolutions only, Mamba 2.
    "qwen3.5": _llama(
        transformers.Qwen3_5TextConfig, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": _llama(transformers.Lfm2Config, layer_types=["conv", "full_attention"]),
    "granite4": _llama(
        transformers.GraniteMoeHybridConfig, layer_types=["mamba", "attention"], mamba_n_heads=8,
        mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, num_local_experts=0,
        shared_intermediate_size=96,
    ),
    # Layers older than Transformers' attention interface.
    "bloom": _gpt(
        transformers.BloomConfig, hidden_size=64, n_layer=2, n_head=4, tie_word_embeddings=False
    ),
    "codegen": _gpt(transformers.CodeGenConfig, **_GPT2, rotary_dim=8),
    "falcon": _gpt(transformers.FalconConfig, **_LONG),
    "falcon-40b": _gpt(
        transformers.FalconConfig, **_LONG, new_decoder_architecture=True, num_kv_heads=2
    ),
    "gpt-neo": _gpt(
        transformers.GPTNeoConfig, hidden_size=64, num_layers=2, num_heads=4, window_size=WINDOW,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=CONTEXT,
    ),
    "gpt-neox-japanese": _gpt(
        transformers.GPTNeoXJapaneseConfig, **_LONG, intermediate_multiple_size=2
    ),
    "gptj": _gpt(transformers.GPTJConfig, **_GPT2, rotary_dim=8),
    "mpt": _gpt(
        transformers.MptConfig, d_model=64, n_layers=2, n_heads=4, expansion_ratio=2,
        max_seq_len=CONTEXT,
    ),
    "xglm": _gpt(
        transformers.XGLMConfig, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4,
        max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    ),
    # Architectures that the exporter refuses.
    "falcon-rw": _gpt(transformers.FalconConfig, **_SIZES, alibi=True),
    "roformer": _gpt(transformers.RoFormerConfig, **_LONG, intermediate_size=96, is_decoder=True),
    "llama4": _llama(
        transformers.Llama4TextConfig, head_dim=16, intermediate_size_mlp=96, num_local_experts=4,
        attention_chunk_size=16, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    ),
    "mamba": _gpt(transformers.MambaConfig, hidden_size=64, num_hidden_layers=2),
    "speech-to-text": _bart(transformers.Speech2TextConfig),
    "bigbird-pegasus": _bart(transformers.BigBirdPegasusConfig),
    "longt5": _t5(transformers.LongT5Config),
    "xlnet": _like(
        {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96}, transformers.XLNetConfig,
        vocab_size=VOCAB_SIZE,
    ),
    "jamba": _llama(
        transformers.JambaConfig, attn_layer_period=2, attn_layer_offset=1, num_experts=2,
        use_mamba_kernels=False,
    ),
    "bert": _gpt(transformers.BertConfig, **_LONG, intermediate_size=96),
    "bart-alone": _bart(transformers.BartConfig, is_encoder_decoder=False),
    # Encoder-decoders.
    "t5": _t5(transformers.T5Config),
    "t5-gated": _t5(
        transformers.T5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "mt5": _t5(transformers.MT5Config),
    "umt5": _t5(transformers.UMT5Config),
    "bart": _bart(transformers.BartConfig),
    "mbart": _bart(transformers.MBartConfig, scale_embedding=True),
    "marian": _bart(transformers.MarianConfig),
    "pegasus": _bart(transformers.PegasusConfig),
    "pegasus-x": _bart(transformers.PegasusXConfig, block_size=16, num_global_tokens=4),
    "m2m100": _bart(transformers.M2M100Config),
    "t5gemma": _t5gemma,
    # Its encoder reads audio features.
    "whisper": _like(
        {**_IDS, **_BART, "pad_token_id": 0}, transformers.WhisperConfig, num_mel_bins=FEATURES[0],
        max_source_positions=FEATURES[1] // 2, max_target_positions=CONTEXT,
        decoder_start_token_id=240,
    ),
}  # fmt: skip
# Generation config of Whisper checkpoints; tokens 251 to 256 are timestamps.
WHISPER = {
    "lang_to_id": {"<|en|>": 245, "<|de|>": 242}, "no_timestamps_token_id": 250,
    "task_to_id": {"transcribe": 243, "translate": 244}, "is_multilingual": True,
    "suppress_tokens": [7, 20, 21, 240, 242, 243, 244, 245], "begin_suppress_tokens": [0, 9],
    "max_initial_timestamp_index": 3, "prev_sot_token_id": 248, "max_length": CONTEXT,
}  # fmt: skip
NO_GRAPH = {
    "falcon-rw", "roformer", "llama4", "mamba", "speech-to-text", "bigbird-pegasus", "bert",
    "bart-alone", "longt5", "xlnet", "jamba",
}  # fmt: skip
RECURRENT = ["qwen3.5", "lfm2", "granite4"]
WITH_ENCODER = [
    "t5", "t5-gated", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "pegasus-x", "m2m100",
    "t5gemma",
]  # fmt: skip
SMALL = {"num_hidden_layers": 1}
# An export of one layer takes half the time.
ONE_LAYER = {
    "llama3", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "opt", "gpt-neox", "olmo2", "mixtral"
}  # fmt: skip


def tokenizer(tokens: Sequence[str] = TOKENS) -> PreTrainedTokenizerFast:
    """A byte tokenizer without merges. tokens: in the order of their ids."""
    model = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=EOS)


def trained() -> PreTrainedModel:
    """The bundled draft, in float32, for tests that random weights do not suit: their inputs are
    uncorrelated."""
    folder = Path(__file__).parents[2] / "models" / "draft"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def untrained(name: str, **options: Any) -> PreTrainedModel:
    """A model of the architecture `name`, as Transformers initialises it."""
    torch.manual_seed(0)
    config = ARCHITECTURES[name]()
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, **options)
    return model.eval()


def decoder_kind(config: PretrainedConfig) -> Any:
    """Transformers' auto class for this configuration."""
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if alone else AutoModelForMultimodalLM


def write(
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    blur: float = 0.0,
    tokens: Sequence[str] = TOKENS,
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of the architecture `name`, in the Hugging Face layout.

    blur: standard deviation of noise on the weights, relative to theirs; makes a draft that
    sometimes agrees with the checkpoint of the same seed. generation: extra fields of the
    generation config. overrides: fields of the configuration.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = ARCHITECTURES[name](**overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if config.is_encoder_decoder:
            is_audio = name in ("whisper", "speech-to-text")
            kind = AutoModelForSpeechSeq2Seq if is_audio else AutoModelForSeq2SeqLM
            model = kind.from_config(config)
        else:
            model = decoder_kind(config).from_config(config)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                # Layers outweigh the embeddings, so that the output depends on the whole context.
                inner = any(part in path for part in (".layers.", ".h.", ".block.", ".blocks."))
                size = 0.1 if parameter.dim() < 2 else 0.3 if inner else 0.15
                parameter.add_(torch.randn_like(parameter), alpha=size)
            torch.manual_seed(seed + 1)
            for parameter in model.parameters() if blur else ():
                noise = torch.randn_like(parameter)
                parameter.add_(noise * parameter.std(correction=0), alpha=blur)
    if name == "mbart":
        model.generation_config.forced_bos_token_id = FORCED
    if name == "whisper":
        # A config marked as derived from the model's is loaded without model-specific fields.
        model.generation_config._from_model_config = False
        generation = {**WHISPER, **(generation or {})}
    for field, value in (generation or {}).items():
        if value is not None:  # Transformers tests some fields with hasattr
            setattr(model.generation_config, field, value)
    if name == "whisper":
        bands, frames = FEATURES
        transformers.WhisperFeatureExtractor(
            bands, sampling_rate=16_000, hop_length=16_000 // frames, chunk_length=1
        ).save_pretrained(folder)
    if name == "speech-to-text":
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer(tokens).save_pretrained(folder)
    return folder


# The same sizes under the names that configurations use; each takes the names it has.
_ANY = {
    **dict.fromkeys(("vocab_size",), VOCAB_SIZE),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), CONTEXT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
    "sliding_window": WINDOW, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_LARGEST = 25_000_000  # most parameters of a tiny model


def write_any(folder: Path, config: type[PretrainedConfig], kind: type) -> str | None:
    """Write a tiny checkpoint of any decoder of Transformers. Returns the reason if that fails."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    usual: Any = config()
    sizes = {name: size for name, size in _ANY.items() if hasattr(usual, name)}
    if "kv_lora_rank" in sizes:  # its key and value heads differ in size and are not shared
        sizes = {**sizes, "num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    reason = ""
    for without in ("", "head_dim", "sliding_window"):
        sizes.pop(without, None)
        try:
            made: Any = config(**sizes)
            for part in vars(made).values():
                if isinstance(part, PretrainedConfig):
                    _shrink(part)
            if getattr(made, "layer_types", None):
                made.layer_types = [*made.layer_types][:2]
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(made).parameters())
            break
        except Exception as error:  # noqa: BLE001 - any configuration's or model's own
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        return reason
    if size > _LARGEST:
        return f"{size:,} parameters"
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = kind(made)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return None


def _shrink(part: PretrainedConfig) -> None:
    """Shrink the configuration of one part of a multimodal model."""
    for name, size in {**_ANY, "depth": 2}.items():
        if hasattr(part, name):
            setattr(part, name, size)
    if getattr(part, "layer_types", None):
        part.layer_types = [*part.layer_types][:2]
    rope = getattr(part, "rope_parameters", None)
    if isinstance(rope, dict):  # some models read this field although it is not written
        part.rope_parameters = {**rope, "mrope_section": [2, 3, 3]}
