"""Published shapes of models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama, with the field names of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


# From config.json of HuggingFaceTB/SmolLM-135M; of Qwen/Qwen2.5-0.5B, without the biases of q, k
# and v; of meta-llama/Llama-3.2-1B.
SHAPES = {
    "smollm-135m": Shape(576, 1536, 30, 9, 3, 49_152),
    "0.5b": Shape(896, 4864, 24, 14, 2, 151_936),
    "1b": Shape(2048, 8192, 16, 32, 8, 128_256),
}


@dataclass(frozen=True)
class Seq2SeqShape:
    """Shape of an encoder-decoder pair. config: name of the Transformers class. common, target,
    draft: its fields, for both models and for each. is_audio: whether the encoder reads audio.
    begin: tokens that every output begins with."""

    config: str
    common: dict[str, int]
    target: dict[str, int]
    draft: dict[str, int]
    is_audio: bool
    begin: tuple[int, ...]


def _whisper(layers: int) -> dict[str, int]:
    """Fields for a decoder with this many layers; the encoder is the same in target and draft."""
    return {
        "d_model": 768, "encoder_layers": 12, "decoder_layers": layers, "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    }  # fmt: skip


# From config.json of google-t5/t5-base and t5-small, with tied embeddings; of openai/whisper-small
# (also tied), with a draft of two decoder layers like distil-whisper/distil-small.en.
SEQ2SEQ = {
    "t5-base": Seq2SeqShape(
        "T5Config", {"vocab_size": 32_128, "d_kv": 64},
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
        False, (1,),
    ),
    "whisper-small": Seq2SeqShape(
        "WhisperConfig", {"vocab_size": 51_865, "num_mel_bins": 80}, _whisper(12), _whisper(2),
        True, (51_862, 51_864),
    ),
}  # fmt: skip
