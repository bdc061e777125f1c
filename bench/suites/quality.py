"""What quantised weights cost: ours of 8 and 4 bits, and llama.cpp's, on one checkpoint.

The full model writes texts at temperature 1. On them, KL(full || quantised) of the next token in
nats. All weights are dequantised and run by torch, so that formats are compared and no kernels;
llama.cpp's are its own quantisers and mixture rules. What a build reports of its engine includes
the rounding of activations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from ..core import machine
from ..core.clock import Clock
from ..core.command import Results, Suite
from ..core.pair import TARGET
from ..core.table import Table
from ..systems import SYSTEMS, gguf

LENGTH = 128
Way = tuple[str, Any, int]  # name, model, bytes of its matrices


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(TARGET), metavar="DIR",
                        help="a checkpoint of full weights; llama.cpp's rows are for Llama and "
                        "Qwen; default: the bundled target")  # fmt: skip
    parser.add_argument(
        "--bits",
        type=float,
        nargs="+",
        default=[],
        metavar="B",
        help="also what int4 costs with these bits a weight",
    )


def measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    import torch

    from export.checkpoint import find
    from export.compare import logits
    from export.loading import load
    from export.weights import quality
    from export.weights.quantising import TEXTS

    torch.set_num_threads(args.threads)
    given = find(args.model)
    full = load(given, torch.float32)
    count = sum(p.numel() for p in full.parameters() if p.dim() > 1)
    clock.note("the full model writes texts")
    ids = quality.sample(full, TEXTS + (8 if args.quick else 64), LENGTH)
    written, ids = quality.Texts(ids[:TEXTS]), ids[TEXTS:]
    said = logits(full, ids)
    del full
    rows, missing = {}, SYSTEMS["llama.cpp"].missing()
    ways = [ours(given.path, written, args.bits, clock)]
    if missing is None:
        ways.append(llamacpp(given.path, clock))
    try:
        for name, model, size in chain(*ways):
            texts = zip(said, logits(model, ids), ids, strict=True)
            found = quality.measure((p[:-1], q[:-1], i[1:]) for p, q, i in texts)
            rows[name] = {"bits": 8 * size / count, **asdict(found)}
    except gguf.NotWritten as error:
        missing = str(error)
    return {"machine": machine.describe(args.threads), "checkpoint": given.source,
            "weights": count, "rows": rows, "missing": missing}  # fmt: skip


def ours(checkpoint: Path, written: Any, bits: list[float], clock: Clock) -> Iterator[Way]:
    """As a build quantises. written: `Texts`, which the levels are chosen by. bits: what BITS says
    in it, for a row of each."""
    import torch

    from export.checkpoint import find
    from export.loading import load
    from export.weights.blocks import Bits
    from export.weights.whole import quantise_model

    kinds: list[tuple[str, Bits, float | None]] = [("int8", 8, None), ("int4", 4, None)]
    for name, each, most in kinds + [(f"int4, BITS={most:g}", 4, most) for most in bits]:
        clock.note(name)
        model = load(find(str(checkpoint)), torch.float32)
        found = quantise_model(model, each, written, most=most)
        yield f"Outrider {name}", model, sum(weight.size for weight in found.values())
        del model


def llamacpp(checkpoint: Path, clock: Clock) -> Iterator[Way]:
    """Through a file in llama.cpp's format. Raises `gguf.NotWritten` for other models."""
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
            yield f"llama.cpp {name}", model, file.stat().st_size - vectors
            del model


def tables(results: Results) -> list[Table]:
    rows = [
        [name, f"{row['bits']:,.2f}", f"{row['kl']:.5f} ± {row['kl_error']:.5f}"]
        for name, row in results["rows"].items()
    ]
    title = f"What quantising costs: {results['checkpoint']}"
    tokens = next(iter(results["rows"].values()))["tokens"]
    notes = [f"{results['weights'] / 1e6:,.1f} M weights, {tokens:,} tokens."]
    if results["missing"]:
        notes.append(f"llama.cpp: {results['missing']}.")
    head = ["weights", "bits a weight", "KL, nats"]
    return [Table(title, head, rows, notes)]


SUITE = Suite(
    "quality", __doc__ or "", "8 texts to measure on, in place of 64", measure, tables,
    options=options,
)  # fmt: skip
main = SUITE.main
