"""The pairs that a GPU is given: the bundled one, and pairs of published shapes.

Time depends on shapes, and on how often the draft is right. So the weights of the latter are
random, but every layer's `o_proj` and `down_proj` are zero: what a layer computes costs what it
costs and adds nothing. The residual stream is the token's embedding, and the model a bigram model,

    logits(x) = H norm(E[x]).

The draft, of hidden size d, has E and H of its own; the target, of hidden size k d, has k copies of
E side by side, of which the norm is k copies of the draft's, and [H, 0, ..., 0]. Their logits are
the same numbers up to rounding. Noise of relative size `delta` on the draft's H then sets how often
it is right, which is measured and not assumed. All is bfloat16, and the embeddings are untied.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...core.pair import DRAFT, TARGET, Shape

# Standard deviation of a logit. 128,256 normal numbers of that size, as logits, give half of the
# probability to one token, and 1.3 between the two largest.
PEAK = 6.0
DELTA = 0.1  # accepted: 0.78 of the examined at temperature 0, 0.82 at 1, at V = 128,256
DTYPE = "bfloat16"
ROPE_THETA = 500_000.0

# "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, and config.json of
# meta-llama/Meta-Llama-3-8B and meta-llama/Llama-3.2-1B, whose embeddings are tied. The rotary base
# is 500,000 in all of them.
LLAMA_8B = Shape(4096, 14_336, 32, 32, 8, 128_256)
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 128_256)
SMALL = Shape(512, 2048, 12, 8, 2, 128_256)  # of nobody's

SHAPES = {  # target, draft, longest text
    "tiny": (Shape(128, 256, 2, 4, 2, 4096), Shape(64, 128, 2, 2, 2, 4096), 256),
    "1b+small": (LLAMA_1B, SMALL, 1024),
    "8b+1b": (LLAMA_8B, LLAMA_1B, 1024),
}
PAIRS = ("bundled", *SHAPES)


def write_pair(name: str, folder: Path, *, delta: float = DELTA) -> tuple[Path, Path]:
    """Write folder/target and folder/draft. name: one of `PAIRS`. delta: size of the noise on the
    draft's output matrix, relative to it."""
    places = folder / "target", folder / "draft"
    if name == "bundled":
        for source, place in zip((TARGET, DRAFT), places, strict=True):
            _round(source, place)
        return places
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"  # where 8e9 random numbers take no time
    target, draft, length = SHAPES[name]
    width = draft.hidden_size
    generator = torch.Generator(device)
    generator.manual_seed(0)

    def normal(deviation: float = 1.0) -> Any:
        size = draft.vocab_size, width
        return deviation * torch.randn(size, generator=generator, device=device)

    deviation = PEAK / width**0.5  # of H: the norm's output has `width` squares of mean 1
    embedding, head = normal(), normal(deviation)
    noisy = (head + delta * normal(deviation)) / (1 + delta**2) ** 0.5
    wide = torch.nn.functional.pad(head, (0, target.hidden_size - width))
    _write(target, length, places[0], embedding.repeat(1, target.hidden_size // width), wide)
    _write(draft, length, places[1], embedding, noisy)
    return places


def _round(source: Path, folder: Path) -> None:
    """A checkpoint with its weights rounded: a float32 reference shall compute with the same."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": DTYPE}))
    weights = load_file(source / "model.safetensors")
    made = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def _write(shape: Shape, length: int, folder: Path, embedding: Any, head: Any) -> None:
    """One checkpoint. embedding, head: [V, hidden], on the device where the others are made."""
    import torch
    import transformers

    from ...core.pair.grow import name_tokens

    library: Any = transformers
    library.logging.disable_progress_bar()
    config = library.LlamaConfig(
        **asdict(shape), max_position_embeddings=length, tie_word_embeddings=False,
        rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )  # fmt: skip
    with embedding.device, torch.no_grad():
        torch.manual_seed(shape.hidden_size)
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder, max_shard_size="4GB")
    for path in TARGET.glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)
    name_tokens(folder, range(shape.vocab_size))
