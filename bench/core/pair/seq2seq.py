"""Encoder-decoder pairs in published shapes, with drafts that agree at a given rate.

There is no trained pair at hand that could be grown. The weights are random, and the output that
each layer adds to the residual stream is scaled by `SMALL_SCALE`: a layer has its usual cost, but
almost no effect. Only the last MLP of the decoder has a large output: half of it is S, the other
half -S, and both relu(x) - relu(-x) and gelu(x) - gelu(-x) are x. So the decoder is a bigram model
of its tied embeddings E,

    logits(x) = c E S norm(E[x]),

where S moves each channel to the next one. A wider target has the draft's E padded with zeros, and
therefore the same logits, up to rounding and the small outputs of the other layers. Noise on the
draft's S then lowers the acceptance rate to the requested value (`blur.bisect`). The target's S is
exact in 4 bits.

The output of such a target at temperature 0 is known beforehand (`greedy_output`), so a source can
contain parts of it. The end-of-text token practically never occurs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from models.measure import acceptance
from runtime.files.folders import write_folder
from runtime.files.progress import stage

from ..machine import CHECKOUT
from .blur import bisect
from .grow import name_tokens
from .shapes import Seq2SeqShape

library: Any = transformers  # has no annotations

SMALL_SCALE, LARGE_SCALE = 2.0**-10, 2.0**10
# Standard deviation of a logit. With 32,000 normally distributed logits of this size, one token
# gets half of the probability.
LOGIT_STD = 6.0
PREDICTIONS = 512  # averaged for the acceptance rate, which is then known to about 0.01
END_OF_TEXT, BUNDLED_TOKENS = 0, 4096  # of the bundled tokenizer: a token, and the number of tokens
# The end of Whisper's vocabulary.
LAST_TOKENS = ("<|startoftranscript|>", "<|nospeech|>", "<|notimestamps|>")
WRITERS = (".o.weight", ".wo.weight", ".out_proj.weight", ".fc2.weight", "embed_positions.weight")


def write(shape: Seq2SeqShape, alpha: float, target: Path, draft: Path) -> None:
    """Write the target, which is the same for every alpha, unless it exists; and the draft, to a
    folder that must be new or empty. Raises OutriderError as `blur.bisect` does."""
    library.logging.set_verbosity_error()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        width, tokens = shape.draft["d_model"], shape.common["vocab_size"]
        embedding = torch.randn(tokens, width)
        embedding -= embedding.mean(1, keepdim=True)  # some norms subtract the mean: make it 0
        embedding[END_OF_TEXT] = 0
        clean, noise = torch.eye(width).roll(1, 0), torch.randn(width, width) / width**0.5
        ids = torch.randint(1, tokens, (PREDICTIONS,))
        with stage("draft", f"find noise for alpha {alpha:g}") as progress:
            size, found = bisect(_alpha_of_noise(embedding, ids, clean, noise), alpha)
            progress.note = f"noise {size:.4f}, alpha {found:.3f}"
        if not target.is_dir():
            _write(shape, shape.target, target, embedding, clean)
        _write(shape, shape.draft, draft, embedding, _add_noise(clean, noise, size))


def configuration(shape: Seq2SeqShape, sizes: dict[str, int]) -> Any:
    """The configuration for Transformers. sizes: the target's or the draft's."""
    own = {"begin_suppress_tokens": None} if shape.is_audio else {}
    return getattr(library, shape.config)(
        **shape.common, **sizes, **own, decoder_start_token_id=shape.begin[0],
        pad_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT, bos_token_id=END_OF_TEXT,
    )  # fmt: skip


def greedy_output(shape: Seq2SeqShape, target: Path, token: int, count: int) -> list[int]:
    """The checkpoint's output at temperature 0 after a token, computed by the formula."""
    from safetensors.torch import load_file

    stored = load_file(target / "model.safetensors")
    endings = "shared.weight", "decoder.embed_tokens.weight"
    (embedding,) = (weight for name, weight in stored.items() if name.endswith(endings))
    width, output = shape.draft["d_model"], [token]
    for _ in range(count):
        row = embedding[output[-1]].clone()
        scaled = LARGE_SCALE * row / row.square().mean().sqrt()
        row[:width] += scaled[:width].roll(1)  # the residual connection keeps the old value
        output.append(int((embedding @ row).argmax()))
    return output[1:]


def _add_noise(clean: torch.Tensor, noise: torch.Tensor, size: float) -> torch.Tensor:
    return (clean + size * noise) / math.sqrt(1 + size**2)


def _alpha_of_noise(
    embedding: torch.Tensor, ids: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor
) -> Callable[[float], float]:
    """A function that returns the acceptance rate after these tokens with noise of a given size."""
    hidden = embedding[ids]
    hidden = hidden / hidden.square().mean(-1, keepdim=True).sqrt() * LOGIT_STD / len(clean) ** 0.5
    clean_logits, noise_logits = hidden @ clean.T @ embedding.T, hidden @ noise.T @ embedding.T
    p = clean_logits.softmax(-1)

    def alpha_of(size: float) -> float:
        return float(acceptance(p, _add_noise(clean_logits, noise_logits, size).softmax(-1)).mean())

    return alpha_of


def _write(
    shape: Seq2SeqShape,
    sizes: dict[str, int],
    out: Path,
    embedding: torch.Tensor,
    shift: torch.Tensor,
) -> None:
    """Write a checkpoint. shift: S; the last MLP of the decoder contains S and -S."""
    torch.manual_seed(0)  # independent of earlier checkpoints
    config = configuration(shape, sizes)
    kind = "AutoModelForSpeechSeq2Seq" if shape.is_audio else "AutoModelForSeq2SeqLM"
    model = getattr(library, kind).from_config(config, dtype=torch.float32)
    if shape.is_audio:  # target and draft have the same encoder, as with Distil-Whisper
        same = torch.Generator().manual_seed(0)
        for weight in model.get_encoder().parameters():
            if weight.dim() > 1 and weight.requires_grad:
                weight.normal_(0, config.init_std, generator=same)
    for name, weight in model.named_parameters():
        if name.endswith(WRITERS):
            weight.mul_(SMALL_SCALE)

    def last_weight(*endings: str) -> torch.Tensor:
        named = model.named_parameters()
        found = [w for name, w in named if "decoder." in name and name.endswith(endings)]
        weight: torch.Tensor = found[-1]
        return weight

    (tokens, width), wide = embedding.shape, sizes["d_model"]
    table = model.get_input_embeddings().weight
    table.zero_()[:, :width] = embedding
    reads = last_weight(".wi.weight", ".fc1.weight")
    writes = last_weight(".wo.weight", ".fc2.weight")
    reads[: 2 * width] = torch.nn.functional.pad(torch.cat([shift, -shift]), (0, wide - width))
    writes[:width, : 2 * width] = LARGE_SCALE * torch.cat([torch.eye(width), -torch.eye(width)], 1)
    scaled = getattr(config, "scale_decoder_outputs", False)  # by wide**-0.5
    norm = last_weight("decoder.final_layer_norm.weight", "decoder.layer_norm.weight")
    norm.fill_(LOGIT_STD * (1 if scaled else wide**-0.5))
    with write_folder(out, "config.json") as partial:
        if shape.is_audio:
            own = {"is_multilingual": False, "no_timestamps_token_id": shape.begin[-1]}
            # Otherwise Transformers derives it from the model's configuration, without them.
            model.generation_config.update(_from_model_config=False, **own)
            library.WhisperFeatureExtractor(config.num_mel_bins).save_pretrained(partial)
        model.save_pretrained(partial)
        _write_tokenizer(partial, tokens, LAST_TOKENS if shape.is_audio else ())


def _write_tokenizer(folder: Path, tokens: int, last: tuple[str, ...]) -> None:
    """Write the bundled tokenizer with a name for each additional token."""
    plain = library.AutoTokenizer.from_pretrained(CHECKOUT / "models" / "target")
    plain.unk_token = plain.eos_token  # required by some converters
    plain.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["vocab"].update({n: tokens - len(last) + i for i, n in enumerate(last)})
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    name_tokens(folder, range(BUNDLED_TOKENS, tokens))
