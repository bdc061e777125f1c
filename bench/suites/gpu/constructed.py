"""Pairs for measurements on a GPU: the bundled one, and constructed pairs of published shapes.

Time depends only on shapes and on the acceptance rate. So constructed pairs have random weights,
but every layer's `o_proj` and `down_proj` are so small that their contribution to the residual
stream is lost when the sum is rounded to bfloat16: a layer has its usual cost, but no effect. The
stream is the token's embedding, and the model a bigram model,

    logits(x) = H norm(E[x]).

The draft, of hidden size d, has its own E and H. The target, of hidden size k d, has k copies of E
side by side, whose norm is k copies of the draft's, and k copies of H / k. Their logits are the
same numbers up to rounding. Noise of relative size `delta` on the draft's H then determines the
acceptance rate, which is measured, not assumed. Everything is bfloat16, and the embeddings are
untied. k is a power of 2, so H / k is exact.

Weights of that size are never written to disk: `unwritten.py` builds bundles without them, and
`fill_weights` computes them in the memory of a loaded engine.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from runtime import TextEngine, load
from runtime.files.graphs import Dtype

from ...core.pair import DRAFT, TARGET, Shape

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

# Standard deviation of a logit. With 128,256 normally distributed logits of this size, one token
# gets half of the probability, and the two largest logits differ by 1.3.
LOGIT_STD = 6.0
DELTA = 0.1  # accepts 0.78 of the examined tokens at temperature 0, 0.82 at 1, with V = 128,256
# Standard deviation of a layer's contribution. In bfloat16, adding 2^-9 to a number in [0.5, 1)
# changes nothing.
LAYER_STD = 2.0**-14
DTYPE: Dtype = "bfloat16"
LOGIT_SPACING = 2.0**-3  # spacing in bfloat16 of logits from 16 to 32, the largest ones
# A choice with a smaller margin may be due to a different order of summation.
NEAR_TIE_MARGIN = 2 * LOGIT_SPACING
MAX_TIE_SHARE = 0.02  # largest share of tokens that may be such choices
PROMPT_LEN = 64
CHUNK = 8192  # rows of H at a time, to limit the host's memory
ROPE_THETA = 500_000.0
SOURCE = "constructed"  # `source` of the graphs of a bundle without weights

# "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3, and config.json of
# meta-llama/Meta-Llama-3-8B and meta-llama/Llama-3.2-1B, whose embeddings are tied. The rotary base
# is 500,000 in all of them.
LLAMA_8B = Shape(4096, 14_336, 32, 32, 8, 128_256)
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 128_256)
SMALL = Shape(512, 2048, 12, 8, 2, 128_256)  # not a published shape


@dataclass(frozen=True)
class ConstructedPair:
    """A constructed pair. length: maximum length of a text."""

    target: Shape
    draft: Shape
    length: int

    def shape(self, role: str) -> Shape:
        return self.target if role == "target" else self.draft


SHAPES = {
    "tiny": ConstructedPair(Shape(128, 256, 2, 4, 2, 4096), Shape(64, 128, 2, 2, 2, 4096), 256),
    "1b+small": ConstructedPair(LLAMA_1B, SMALL, 1024),
    "8b+1b": ConstructedPair(LLAMA_8B, LLAMA_1B, 1024),
}


def write_bundled(folder: Path) -> None:
    """Write the bundled pair to folder/target and folder/draft, rounded to bfloat16, so that a
    float32 reference has the same weights as the GPU."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(folder, ignore_errors=True)  # so that no old bundle is measured
    for source, place in ((TARGET, folder / "target"), (DRAFT, folder / "draft")):
        shutil.copytree(source, place, dirs_exist_ok=True)
        config = json.loads((source / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "dtype": DTYPE}))
        weights = load_file(source / "model.safetensors")
        made = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
        save_file(made, place / "model.safetensors", metadata={"format": "pt"})


def fill_weights(target: Weights, draft: Weights, delta: float = DELTA) -> None:
    """Fill the weights of a pair in place. delta: size of the noise on the draft's H.

    Names are those in a graph, which end like a checkpoint's. Two-dimensional weights are matrices
    [out, in]; the others are norms and buffers that the graph computes, which are kept.
    """
    import torch

    narrow = _named(draft, "embed_tokens.weight")
    vocab_size, width = narrow.shape
    generator = torch.Generator(narrow.device)
    generator.manual_seed(0)

    def random(rows: int, columns: int, deviation: float) -> Any:
        numbers = torch.empty(rows, columns, device=narrow.device)
        return numbers.normal_(0, deviation, generator=generator)

    # Away from 0, near which bfloat16 would keep the contributions of layers.
    embedding = random(vocab_size, width, 1.0)
    embedding = embedding.sign() * (0.5 + embedding.abs().frac())
    deviation = LOGIT_STD / width**0.5  # of H: the norm's output has `width` squares of mean 1
    head = random(vocab_size, width, deviation).bfloat16().float()  # copied by the target
    noise = random(vocab_size, width, deviation)
    noisy = (head + delta * noise) / (1 + delta**2) ** 0.5
    for weights, last in ((target, head), (draft, noisy)):
        copies = _named(weights, "embed_tokens.weight").shape[1] // width
        for name, weight in weights.items():
            if name.endswith("embed_tokens.weight"):
                weight.copy_(embedding.repeat(1, copies))
            elif name.endswith("lm_head.weight"):
                weight.copy_((last / copies).repeat(1, copies))
            elif weight.dim() == 2 and name.endswith(".weight"):
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(
                    0,
                    (LAYER_STD if writes_residual else 1.0) / weight.shape[1] ** 0.5,
                    generator=generator,
                )
            elif name.endswith("norm.weight"):
                weight.fill_(1)
    if narrow.is_cuda:
        torch.cuda.synchronize()  # an engine's stream does not wait for torch's


def _named(weights: Weights, ending: str) -> torch.Tensor:
    return next(weight for name, weight in weights.items() if name.endswith(ending))


def check_bigram(weights: Weights, tokens: Sequence[int], output: Sequence[int]) -> dict[str, Any]:
    """Check that `output[i]` is the output of the bigram model of these weights after `tokens[i]`
    at temperature 0. NumPy computes the logits in float32 and rounds them to bfloat16, as a model
    does; the first of equal logits wins."""
    rows = _named(weights, "embed_tokens.weight")[list(tokens)].float().cpu().numpy()
    rows = as_bfloat16(rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5, dtype=np.float32))
    matrix = _named(weights, "lm_head.weight")
    ids, index = np.array(output), np.arange(len(output))
    best, chosen = np.full(len(output), -np.inf, np.float32), np.empty(len(output), np.float32)
    expected = np.zeros(len(output), np.int64)
    for begin in range(0, len(matrix), CHUNK):
        part = matrix[begin : begin + CHUNK].float().cpu().numpy()
        logits = as_bfloat16(rows @ part.T)
        first = logits.argmax(-1)
        larger = logits[index, first] > best
        expected[larger], best[larger] = begin + first[larger], logits[index, first][larger]
        inside = (ids >= begin) & (ids < begin + len(part))
        chosen[inside] = logits[index[inside], ids[inside] - begin]
    differ = expected != ids
    margins = (best - chosen)[differ]
    near = int((margins <= NEAR_TIE_MARGIN).sum())
    return {
        "passed": bool(near == len(margins) <= max(1, MAX_TIE_SHARE * len(output))),
        "tokens": len(output), "as_expected": int((~differ).sum()), "near_ties": near,
        "largest_margin": round(float(margins.max(initial=0)), 4),
    }  # fmt: skip


def as_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to bfloat16, halves to even, and convert back to float32."""
    bits = numbers.view(np.uint32)
    rounded: npt.NDArray[np.uint32] = bits + 0x7FFF + ((bits >> 16) & 1) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def open_pair(folder: Path, device: str, **options: Any) -> TextEngine:
    """Load folder/bundle; for a constructed pair, also fill its weights. options: of `load`."""
    engine = load(folder / "bundle", device=device, verify=False, reuse=False, **options)
    if is_constructed(engine):
        fill_weights(engine_weights(engine, "target"), engine_weights(engine, "draft"))
        free_gpu_memory()  # gigabytes of float32 that would be counted as the engine's memory
    return engine


def free_gpu_memory() -> None:
    """Free the GPU memory of deleted engines, which torch would keep in its cache."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def is_constructed(engine: TextEngine) -> bool:
    return engine.manifest.pair.target.source.startswith(SOURCE)


def engine_weights(engine: TextEngine, role: str) -> Weights:
    """The weights that the compiled code of a constructed pair's engine reads."""
    found: Weights = getattr(engine.decoder, role).weights
    return found


def random_prompts(engine: TextEngine, count: int) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, engine.decoder.vocab_size, PROMPT_LEN).tolist() for _ in range(count)]
