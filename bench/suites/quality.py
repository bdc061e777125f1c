"""Quality loss from quantised weights on one checkpoint: Outrider's int8 and int4, and llama.cpp's.

The full model generates texts at temperature 1; on these, KL(full || quantised) of the next token
is computed in nats. All weights are dequantised and run by torch, so this compares formats, not
kernels. llama.cpp's weights come from its own quantisers and mixture rules. The loss that a build
reports for its engine also includes the rounding of activations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from runtime.files.errors import refuse_first

from ..core import machine
from ..core.clock import Clock
from ..core.command import Results, Suite
from ..core.pair import TARGET
from ..core.table import Table
from ..systems import SYSTEMS, gguf

LENGTH = 128
QuantisedModel = tuple[str, Any, float]  # name, model, bits per weight of its matrices


def bits_per_weight(text: str) -> float:
    if not 4.5 <= (bits := float(text)) <= 8.5:
        raise argparse.ArgumentTypeError(f"{bits:g} is not from 4.5 to 8.5")
    return bits


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(TARGET), metavar="DIR",
                        help="checkpoint that is not quantised; llama.cpp is measured for Llama "
                        "and Qwen only (default: the bundled target)")  # fmt: skip
    parser.add_argument(
        "--bits",
        type=bits_per_weight,
        nargs="+",
        default=[],
        metavar="B",
        help="also measure int4 with these numbers of bits per weight, from 4.5 to 8.5",
    )


def measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    import torch

    from export.checkpoint import find
    from export.compare import logits
    from export.loading import load
    from export.weights import quality
    from export.weights.quantising import TEXTS

    torch.set_num_threads(args.threads)
    checkpoint = find(args.model)
    refuse_first([
        (checkpoint.has_encoder, f"{checkpoint.source} is an encoder-decoder, which needs a source",
         "Choose a --model without an encoder."),
    ])  # fmt: skip
    full = load(checkpoint, torch.float32)
    count = sum(p.numel() for p in full.parameters() if p.dim() > 1)
    clock.note("generating texts with the full model")
    ids = quality.sample(full, TEXTS + (8 if args.quick else 64), LENGTH)
    calibration, ids = quality.Texts(ids[:TEXTS]), ids[TEXTS:]
    full_logits = logits(full, ids)
    del full
    rows, missing = {}, SYSTEMS["llama.cpp"].missing_reason()
    ways = [outrider_models(checkpoint, calibration, args.bits, clock)]
    if missing is None:
        ways.append(llamacpp_models(checkpoint.path, clock))
    try:
        for name, model, bits in chain(*ways):
            texts = zip(full_logits, logits(model, ids), ids, strict=True)
            found = quality.measure((p[:-1], q[:-1], i[1:]) for p, q, i in texts)
            rows[name] = {"bits": bits, **asdict(found)}
    except gguf.ConversionError as error:
        missing = str(error)
    return {"machine": machine.describe(args.threads), "checkpoint": checkpoint.source,
            "weights": count, "rows": rows, "missing": missing}  # fmt: skip


def outrider_models(
    checkpoint: Any, calibration: Any, bits: list[float], clock: Clock
) -> Iterator[QuantisedModel]:
    """Models quantised as in a build. checkpoint: a `Checkpoint`. calibration: `Texts` for choosing
    the levels. bits: values of BITS, each for another row."""
    import torch

    from export.loading import load
    from export.weights import blocks
    from export.weights.whole import quantise_model

    kinds: list[tuple[str, blocks.Bits, float | None]] = [("int8", 8, None), ("int4", 4, None)]
    kinds += [(f"int4, BITS={most:g}", 4, most) for most in bits]
    for name, each, most in kinds:
        clock.note(name)
        model = load(checkpoint, torch.float32)
        found = quantise_model(model, each, calibration, max_bits=most)
        yield f"Outrider {name}", model, blocks.bits_per_weight(found.values())
        del model


def llamacpp_models(checkpoint: Path, clock: Clock) -> Iterator[QuantisedModel]:
    """Models quantised by llama.cpp, through GGUF files. Raises `gguf.ConversionError` for models
    that cannot be converted."""
    import torch

    from export.checkpoint import find
    from export.loading import load

    with tempfile.TemporaryDirectory() as folder:
        whole, file = Path(folder) / "float32.gguf", Path(folder) / "quantised.gguf"
        gguf.write(checkpoint, whole)
        for name in gguf.MIXTURES:
            clock.note(f"llama.cpp {name}")
            gguf.quantize(whole, file, name, torch.get_num_threads())
            model = load(find(str(file)), torch.float32)
            vectors = sum(4 * p.numel() for p in model.parameters() if p.dim() < 2)
            matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
            yield f"llama.cpp {name}", model, 8 * (file.stat().st_size - vectors) / matrices
            del model


def tables(results: Results) -> list[Table]:
    rows = [
        [name, f"{row['bits']:,.2f}", f"{row['kl']:.5f} ± {row['kl_error']:.5f}"]
        for name, row in results["rows"].items()
    ]
    title = f"Quality loss from quantisation: {results['checkpoint']}"
    tokens = next(iter(results["rows"].values()))["tokens"]
    notes = [f"{results['weights'] / 1e6:,.1f} M weights, {tokens:,} tokens."]
    if results["missing"]:
        notes.append(f"llama.cpp: {results['missing']}.")
    head = ["weights", "bits per weight", "KL, nats"]
    return [Table(title, head, rows, notes)]


SUITE = Suite(
    "quality", __doc__ or "", "8 texts instead of 64", measure, tables,
    options=options,
)  # fmt: skip
main = SUITE.main
