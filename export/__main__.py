"""python -m export: export a checkpoint pair to a folder of portable graphs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from runtime.files.errors import CommandParser, defer_interrupts, positive_int, run_command

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

A model whose checkpoint, options and exporter have not changed is taken from the cache.
"""


def parser() -> argparse.ArgumentParser:
    # Imported here so that Ctrl-C ends it with one line.
    from runtime.files.graphs import Cache, Dtype, Format, Weights
    from runtime.files.manifest import ENCODER_DECODERS, RECURRENT_STATES

    all_weights = ["full", *get_args(Weights)]
    parser = CommandParser(prog="python -m export", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    # fmt: off
    add("--model", required=True,
        help="target model: a folder, a GGUF file, or a name on the Hugging Face hub")
    add("--draft", default="none",
        help="draft model, in any form that --model takes; self for a 4-bit copy of the target; "
        "ngram for lookups in the text; or none (default: none)")
    add("--out", required=True, type=Path, help="output folder")
    add("--dtype", default="float32", choices=get_args(Dtype),
        help="precision of activations, cache and unquantised weights (default: float32, the "
        "right choice for CPUs)")
    add("--weights", choices=all_weights,
        help="precision of the target's matrices: 8 or 4 bits, float8 (GPUs only), or full for "
        "that of --dtype (default: full; int4 or int8 for a checkpoint quantised to 4 or 8 bits)")
    add("--bits", type=float, metavar="B",
        help="maximum average bits per weight of an int4 target, scales included, 4.5 to 8.5: the "
        "matrices where 4 bits lose the most quality get 8 (default: as many bytes per step as "
        "with 8 bits for the output matrix alone)")
    add("--draft-weights", choices=all_weights,
        help="precision of the draft's matrices, which changes the speed but not the output "
        "(default: that of the target; int8 for a full target on the CPU; int4 for --draft self)")
    add("--backend-runs", type=str.split, metavar="KINDS",
        default=" ".join([*all_weights, ENCODER_DECODERS, RECURRENT_STATES]),
        help="kinds of weights that the backend runs, and whether it runs encoder-decoders and "
        "recurrent states, as printed by python -m engines --supports; anything else is refused "
        "before the export (default: all)")
    add("--cache-type", choices=["full", *get_args(Cache)], default="full",
        help="precision of keys and values: int8 for cheaper attention over long texts (ONNX "
        "Runtime on the CPU only), or full for that of --dtype (default: full)")
    add("--text", type=Path, metavar="FILE",
        help="text to measure the quality of quantised weights on (default: text that the model "
        "generates)")
    add("--max-len", type=positive_int,
        help="maximum length of prompt plus output, in tokens (default: 2048, or the target's "
        "context if shorter)")
    add("--max-gamma", type=positive_int, default=8,
        help="maximum number of draft tokens per round, up to 64 (default: 8)")
    add("--format", dest="form", default="onnx", choices=get_args(Format),
        help="format of the graphs: torch for --backend aotinductor, onnx for all others (default: "
        "onnx)")
    add("--cache", type=Path, default=Path("build/.cache"),
        help="folder that keeps finished models for later exports (default: build/.cache)")
    add("--force", action="store_true", help="export again even if the model is in the cache")
    # fmt: on
    return parser


def main(argv: list[str] | None = None) -> int:
    def command() -> int:
        options = vars(parser().parse_args(argv))
        for option, default in (("draft", "none"), ("cache_type", "full")):
            if options[option] == default:
                options[option] = None
        # Imported late: --help and a mistyped option should not wait for torch.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Threads that spin at the end of an operation occupy the cores of those they wait for:
        # beside one busy process, rounding with error feedback took ten times as long.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        with defer_interrupts():
            from .pair import export

        export(**options)
        return 0

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
