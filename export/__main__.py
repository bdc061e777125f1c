"""python -m export: a checkpoint pair becomes a folder of portable graphs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runtime.files.errors import CommandParser, defer_interrupts, run_command
from runtime.files.manifest import ENCODER_DECODERS, RECURRENT_STATES

DESCRIPTION = """\
Export a Hugging Face checkpoint pair to graphs with explicit cache slots, check them against the
original models, and write them with the tokenizer to a folder that `python -m engines` turns into
a bundle. `make engines` runs both.
"""
EPILOG = """\
examples:
  python -m export --model models/target --draft models/draft --out build/graphs/demo
  python -m export --model ~/checkpoints/my-7b --draft none --out build/graphs/my-7b

  python -m export --model ~/checkpoints/my-7b --draft self --weights int8 --out build/graphs/my-7b

A part whose checkpoint, options and exporter did not change is taken from the cache.
"""

WEIGHTS = ["full", "int8", "int4", "fp8"]


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m export",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--model", required=True, help="the target: a folder, a GGUF file, or a name on the hub")
    add(
        "--draft",
        default="none",
        help="the draft, likewise; self for the target's own copy in 4 bits; ngram for "
        "lookups in the text; or none",
    )
    add("--out", required=True, type=Path, help="folder to write")
    add(
        "--dtype",
        default="float32",
        choices=["float32", "float16", "bfloat16"],
        help="precision of activations and cache, and of weights that are not quantised "
        "(default: float32, right for CPUs)",
    )
    add(
        "--weights",
        choices=WEIGHTS,
        help="of the target's matrices: 8 or 4 bits, float8 for GPUs, or full, as --dtype says "
        "(default: full, or as a quantised checkpoint has them)",
    )
    add(
        "--bits",
        type=float,
        metavar="B",
        help="a weight, scales included, that int4 of the target may take, 4.5 to 8.5: matrices "
        "that cost the model the most with 4 have 8 (default: as many bytes a step as with 8 for "
        "the output matrix alone)",
    )
    add(
        "--draft-weights",
        choices=WEIGHTS,
        help="of the draft's (default: as the target's; of --draft self: int4)",
    )
    add(
        "--backend-runs",
        type=str.split,
        default=" ".join([*WEIGHTS, ENCODER_DECODERS, RECURRENT_STATES]),
        metavar="KINDS",
        help="the weights, and whether encoder-decoders and recurrent states, that the graphs' "
        "backend runs, as python -m engines --supports says; others are refused before the export "
        "(default: all)",
    )
    add(
        "--cache-type",
        choices=["full", "int8"],
        default="full",
        help="of keys and values: int8 for attention that is cheaper over long texts, on ONNX "
        "Runtime on the CPU alone; or full, as --dtype says (default: full)",
    )
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="to measure the quality of quantised weights on (default: what the model writes)",
    )
    add(
        "--max-len",
        type=_positive,
        help="longest prompt + output, in tokens (default: 2048, or the target's if shorter)",
    )
    add(
        "--max-gamma",
        type=_positive,
        default=8,
        help="most draft tokens a round, up to 64 (default: 8)",
    )
    add(
        "--format",
        dest="form",
        default="onnx",
        choices=["onnx", "torch"],
        help="of the graphs: torch for --backend aotinductor, onnx for all others (default: onnx)",
    )
    add(
        "--cache",
        type=Path,
        default=Path("build/.cache"),
        help="where finished parts are kept (default: build/.cache)",
    )
    add("--force", action="store_true", help="export again even what is in the cache")
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def main(argv: list[str] | None = None) -> int:
    def command() -> int:
        given = vars(parser().parse_args(argv))
        for option, nothing in (("draft", "none"), ("cache_type", "full")):
            if given[option] == nothing:
                given[option] = None
        # Imported late: --help and a mistyped option should not wait for torch.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Threads that spin at the end of an operation keep the ones they wait for from their cores:
        # beside one busy process rounding with feedback took ten times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with defer_interrupts():
            from .pair import export

        export(**given)
        return 0

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
