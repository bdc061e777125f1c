"""python -m bench.systems.gguf CHECKPOINT FILE [--type q8_0]: convert Llama or Qwen for llama.cpp.

The file has no vocabulary, only its size, so it can only be used with token ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
# llama.cpp's mixtures. It uses a wider type for rows that are not a multiple of the block size.
MIXTURES = {
    "bf16": "LLAMA_FTYPE_MOSTLY_BF16",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "q4_K_S": "LLAMA_FTYPE_MOSTLY_Q4_K_S",
    "q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
}


# By Transformers' model type: llama.cpp's architecture, and whether it rotates adjacent rows.
FAMILIES = {
    "llama": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}  # fmt: skip


class ConversionError(ValueError):
    """The checkpoint cannot be converted: another family, or not in the Hugging Face layout."""


def write(checkpoint: Path, file: Path) -> None:
    """Write the checkpoint's weights in float32, under llama.cpp's names.

    Raises:
        ConversionError: the checkpoint is not of `FAMILIES`, has a sliding window, or has a rotary
            embedding other than the default or Llama 3's.
    """
    import gguf
    from transformers import AutoConfig

    if not checkpoint.is_dir():
        raise ConversionError("only a folder in the Hugging Face layout can be converted")
    config: Any = AutoConfig.from_pretrained(checkpoint)
    rope, kind = getattr(config, "rope_parameters", {}), config.model_type
    if kind not in FAMILIES or rope["rope_type"] not in ("default", "llama3"):
        raise ConversionError(
            f"only {', '.join(FAMILIES)} with usual rotary embeddings can be converted"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        kind == "mistral" and config.sliding_window
    ):
        raise ConversionError("sliding windows cannot be converted")
    architecture, neighbours = FAMILIES[kind]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config, width))
    arch = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    rotated = {f"{side}_proj.{part}": count for part in ("weight", "bias")
               for side, count in (("q", heads), ("k", kv_heads)) if neighbours}  # fmt: skip
    for source, tensor in tensors(checkpoint):
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConversionError(f"llama.cpp has no name for {source}")
        count = next((count for end, count in rotated.items() if source.endswith(end)), None)
        writer.add_tensor(name, interleaved(tensor, count) if count else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_factors(config: Any, width: int) -> Array:
    """The factors by which Llama 3 divides each of the width / 2 rotary frequencies, as computed by
    Transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    default = config.rope_parameters["rope_theta"] ** -(np.arange(0, width, 2) / width)
    factors: Array = (default / scaled.numpy()).astype(np.float32)
    return factors


def tensors(checkpoint: Path) -> Iterator[tuple[str, Array]]:
    """Names and float32 values of all stored tensors."""
    import safetensors
    import torch

    for path in sorted(checkpoint.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name).to(torch.float32).numpy()


def interleaved(weight: Array, heads: int) -> Array:
    """The rows of a projection [heads * width, hidden] (or its biases) in the order of llama.cpp's
    rotation.

    Transformers rotates row i of a head with row i + width / 2, llama.cpp row 2 i with 2 i + 1.
    """
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def quantize(source: Path, file: Path, mixture: str, threads: int) -> None:
    """Quantise a float32 GGUF file to one of `MIXTURES`, with llama.cpp itself."""
    import llama_cpp

    library: Any = llama_cpp
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = getattr(library, MIXTURES[mixture])
    parameters.nthread = threads
    if library.llama_model_quantize(bytes(source), bytes(file), parameters):
        raise RuntimeError(f"llama.cpp cannot quantise to {mixture}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.systems.gguf", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=("float32", *MIXTURES), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.type == "float32":
        write(args.checkpoint, args.file)
        return
    whole = args.file.with_suffix(".float32")
    write(args.checkpoint, whole)
    quantize(whole, args.file, args.type, args.threads)
    whole.unlink()


if __name__ == "__main__":
    main()
