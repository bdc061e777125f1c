"""Encoder-decoder pairs in published shapes, with drafts that agree as often as is asked for.

There is no trained one at hand that could be grown. The weights are random, and what a layer writes
to the residual stream is scaled by `QUIET`: a layer costs what it costs and changes hardly a thing.
The last MLP of the decoder alone speaks up: half of it is S, the other half -S, and both relu(x) -
relu(-x) and gelu(x) - gelu(-x) are x. So the decoder is a bigram model of its tied embeddings E,

    logits(x) = c E S norm(E[x]),

where S moves each channel to the next one. A wider target has the draft's E beside zeros, and so
its logits, up to rounding and what is whispered. Noise on the draft's S then takes away acceptance
until it is what was asked for (`blur.bisect`). Four bits lose nothing of the S that the target has.

What such a target says at temperature 0 is known beforehand (`says`), so a source can hold some of
it. The end of a text is as good as never said.
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
from .shapes import Seq2Seq

library: Any = transformers  # without annotations

QUIET, LOUD = 2.0**-10, 2.0**10
# Standard deviation of a logit. 32,000 normal numbers of that size, as logits, give half of the
# probability to one token.
PEAK = 6.0
PREDICTIONS = 512  # of which the acceptance is the mean: it is known to about 0.01
END, PLAIN = 0, 4096  # tokens of the bundled tokenizer: the end of a text, and how many there are
LAST = ("<|startoftranscript|>", "<|nospeech|>", "<|notimestamps|>")  # of a Whisper's vocabulary
WRITERS = (".o.weight", ".wo.weight", ".out_proj.weight", ".fc2.weight", "embed_positions.weight")


def write(shape: Seq2Seq, alpha: float, target: Path, draft: Path) -> None:
    """The target, which is the same for every alpha, unless it is there; and the draft, to a folder
    that is new or empty. Raises OutriderError as `blur.bisect`."""
    library.logging.set_verbosity_error()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        width, tokens = shape.draft["d_model"], shape.common["vocab_size"]
        embedding = torch.randn(tokens, width)
        embedding -= embedding.mean(1, keepdim=True)  # so that a norm that takes it away finds none
        embedding[END] = 0
        clean, noise = torch.eye(width).roll(1, 0), torch.randn(width, width) / width**0.5
        ids = torch.randint(1, tokens, (PREDICTIONS,))
        with stage("draft", f"find noise for alpha {alpha:g}") as said:
            size, found = bisect(_noisy(embedding, ids, clean, noise), alpha)
            said.note = f"noise {size:.4f}, alpha {found:.3f}"
        if not target.is_dir():
            _write(shape, shape.target, target, embedding, clean)
        _write(shape, shape.draft, draft, embedding, _blurred(clean, noise, size))


def configuration(shape: Seq2Seq, sizes: dict[str, int]) -> Any:
    """Of Transformers. sizes: the target's or the draft's."""
    own = {"begin_suppress_tokens": None} if shape.sound else {}
    return getattr(library, shape.config)(
        **shape.common, **sizes, **own, decoder_start_token_id=shape.begin[0],
        pad_token_id=END, eos_token_id=END, bos_token_id=END,
    )  # fmt: skip


def says(shape: Seq2Seq, target: Path, token: int, count: int) -> list[int]:
    """What the checkpoint says at temperature 0 after a token, by the formula."""
    from safetensors.torch import load_file

    stored = load_file(target / "model.safetensors")
    endings = "shared.weight", "decoder.embed_tokens.weight"
    (embedding,) = (weight for name, weight in stored.items() if name.endswith(endings))
    width, said = shape.draft["d_model"], [token]
    for _ in range(count):
        row = embedding[said[-1]].clone()
        loud = LOUD * row / row.square().mean().sqrt()
        row[:width] += loud[:width].roll(1)  # what it was is still there
        said.append(int((embedding @ row).argmax()))
    return said[1:]


def _blurred(clean: torch.Tensor, noise: torch.Tensor, size: float) -> torch.Tensor:
    return (clean + size * noise) / math.sqrt(1 + size**2)


def _noisy(
    embedding: torch.Tensor, ids: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor
) -> Callable[[float], float]:
    """What measures the acceptance after these tokens, with noise of a size."""
    read = embedding[ids]
    read = read / read.square().mean(-1, keepdim=True).sqrt() * PEAK / len(clean) ** 0.5
    sure, dirt = read @ clean.T @ embedding.T, read @ noise.T @ embedding.T
    p = sure.softmax(-1)

    def at(size: float) -> float:
        return float(acceptance(p, _blurred(sure, dirt, size).softmax(-1)).mean())

    return at


def _write(
    shape: Seq2Seq, sizes: dict[str, int], out: Path, embedding: torch.Tensor, move: torch.Tensor
) -> None:
    """move: S, of which the model has S and -S in the last MLP of its decoder."""
    torch.manual_seed(0)  # whatever was made before
    config = configuration(shape, sizes)
    kind = "AutoModelForSpeechSeq2Seq" if shape.sound else "AutoModelForSeq2SeqLM"
    model = getattr(library, kind).from_config(config, dtype=torch.float32)
    if shape.sound:  # target and draft have one encoder, as Distil-Whisper's
        same = torch.Generator().manual_seed(0)
        for weight in model.get_encoder().parameters():
            if weight.dim() > 1 and weight.requires_grad:
                weight.normal_(0, config.init_std, generator=same)
    for name, weight in model.named_parameters():
        if name.endswith(WRITERS):
            weight.mul_(QUIET)

    def last(*endings: str) -> torch.Tensor:
        named = model.named_parameters()
        found = [w for name, w in named if "decoder." in name and name.endswith(endings)]
        weight: torch.Tensor = found[-1]
        return weight

    (tokens, width), wide = embedding.shape, sizes["d_model"]
    table = model.get_input_embeddings().weight
    table.zero_()[:, :width] = embedding
    reads, writes = last(".wi.weight", ".fc1.weight"), last(".wo.weight", ".fc2.weight")
    reads[: 2 * width] = torch.nn.functional.pad(torch.cat([move, -move]), (0, wide - width))
    writes[:width, : 2 * width] = LOUD * torch.cat([torch.eye(width), -torch.eye(width)], 1)
    scaled = getattr(config, "scale_decoder_outputs", False)  # by wide**-0.5
    norm = last("decoder.final_layer_norm.weight", "decoder.layer_norm.weight")
    norm.fill_(PEAK * (1 if scaled else wide**-0.5))
    with write_folder(out, "config.json") as partial:
        if shape.sound:
            own = {"is_multilingual": False, "no_timestamps_token_id": shape.begin[-1]}
            # One that comes from the configuration is read without what is of one kind alone.
            model.generation_config.update(_from_model_config=False, **own)
            library.WhisperFeatureExtractor(config.num_mel_bins).save_pretrained(partial)
        model.save_pretrained(partial)
        _write_tokenizer(partial, tokens, LAST if shape.sound else ())


def _write_tokenizer(folder: Path, tokens: int, last: tuple[str, ...]) -> None:
    """The bundled one, with a name for each token more."""
    plain = library.AutoTokenizer.from_pretrained(CHECKOUT / "models" / "target")
    plain.unk_token = plain.eos_token  # which some converters want
    plain.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["vocab"].update({n: tokens - len(last) + i for i, n in enumerate(last)})
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    name_tokens(folder, range(PLAIN, tokens))
