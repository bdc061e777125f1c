"""A pair of checkpoints of published shapes whose acceptance is set by construction.

Time depends on shapes, and on how often the draft is right. So the weights are random, but every
layer's `o_proj` and `down_proj` are zero: what a layer computes costs what it costs and adds
nothing. The residual stream is the token's embedding, and the model a bigram model,

    logits(x) = H norm(E[x]).

The draft, of hidden size d, has E and H of its own; the target, of hidden size k d, has k copies of
E side by side, of which the norm is k copies of the draft's, and [H, 0, ..., 0]. Their logits are
the same numbers up to rounding. Noise of relative size `delta` on the draft's H then sets how often
it is right, which is measured and not assumed. All is bfloat16, and the embeddings are untied.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.pair import Shape

# Standard deviation of a logit. 128,256 normal numbers of that size, as logits, give half of the
# probability to one token, and 1.3 between the two largest.
PEAK = 6.0
DELTA = 0.1  # accepted: 0.78 of the examined at temperature 0, 0.82 at 1, at V = 128,256


@dataclass(frozen=True)
class Preset:
    """The shapes of a pair. max_len: of its bundles."""

    target: Shape
    draft: Shape
    max_len: int

    def __post_init__(self) -> None:
        assert self.target.hidden_size % self.draft.hidden_size == 0
        assert self.target.vocab_size == self.draft.vocab_size


# "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, and config.json of
# meta-llama/Meta-Llama-3-8B and meta-llama/Llama-3.2-1B, whose embeddings are tied. The rotary base
# is 500,000 in all of them.
LLAMA_8B = Shape(4096, 14_336, 32, 32, 8, 128_256)
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 128_256)
SMALL = Shape(512, 2048, 12, 8, 2, 128_256)  # of nobody's
ROPE_THETA = 500_000.0

PRESETS = {
    "tiny": Preset(Shape(128, 256, 2, 4, 2, 512), Shape(64, 128, 2, 2, 2, 512), 256),
    "1b+small": Preset(LLAMA_1B, SMALL, 1024),
    "8b+1b": Preset(LLAMA_8B, LLAMA_1B, 1024),
}


def write_pair(
    preset: Preset, folder: Path, *, delta: float = DELTA, seed: int = 0
) -> tuple[Path, Path]:
    """Write folder/target and folder/draft, unless they are there. delta: size of the noise on the
    draft's output matrix, relative to it."""
    paths = folder / "target", folder / "draft"
    stamp = folder / "constructed.json"
    wanted = json.dumps({**asdict(preset), "delta": delta, "seed": seed})
    if stamp.is_file() and stamp.read_text() == wanted:
        return paths
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"  # where 8e9 random numbers take no time
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    vocab_size, width = preset.draft.vocab_size, preset.draft.hidden_size
    deviation = PEAK / width**0.5  # of H: the norm's output has width squares of mean 1

    def normal() -> Any:
        return torch.randn(vocab_size, width, generator=generator, device=device)

    embedding, head = normal(), deviation * normal()
    noisy = (head + delta * deviation * normal()) / (1 + delta**2) ** 0.5
    copies = preset.target.hidden_size // width
    _write(preset.draft, preset.max_len, paths[1], embedding, noisy, device, seed + 1)
    wide = torch.nn.functional.pad(head, (0, preset.target.hidden_size - width))
    del noisy, head
    _write(
        preset.target, preset.max_len, paths[0], embedding.repeat(1, copies), wide, device, seed + 2
    )
    stamp.write_text(wanted)  # last: what is half written is made again
    return paths


def _write(
    shape: Shape, max_len: int, folder: Path, embedding: Any, head: Any, device: str, seed: int
) -> None:
    """One checkpoint. embedding, head: [V, hidden]."""
    import torch
    import transformers

    library: Any = transformers
    library.logging.disable_progress_bar()
    config = library.LlamaConfig(
        **asdict(shape),
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    devices = [0] if device == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device), torch.no_grad():
        torch.manual_seed(seed)
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder, max_shard_size="4GB")
    _tokenizer(shape.vocab_size).save_pretrained(folder)


def _tokenizer(vocab_size: int) -> Any:
    """Of exactly V tokens: one id a byte; the others have names that no text gives."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused{i}>" for i in range(vocab_size - len(names))]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # its __init__ has no annotations
    return fast(tokenizer_object=backend, eos_token="</s>")
