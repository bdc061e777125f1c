"""python -m export.functions: add the verification of a round to a target's graph."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from runtime.files.errors import CommandParser, OutriderError, first_line, refuse_first, run_command
from runtime.files.graphs import GRAPH_FILE
from runtime.files.torch_files import WEIGHTS_FILE

DESCRIPTION = """\
Append the node outrider::Verify to a target's graph: a call over the pending token and the drafts
then also returns how many drafts are accepted, and which token follows. The node is a function of
standard operators, which TensorRT replaces by the plugin of `make plugin`: see docs/tensorrt.md.
"""
EPILOG = """\
examples:
  python -m export.functions --graph build/demo/target --out build/verify

  python -m export --model ~/checkpoints/my-7b --dtype float16 --out build/graphs/my-7b
  python -m export.functions --graph build/graphs/my-7b/target --rows 2064 --out build/verify
"""


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m export.functions", description=DESCRIPTION, epilog=EPILOG
    )
    add = parser.add_argument
    add("--graph", type=Path, required=True, metavar="DIR",
        help="folder of a target's graph.onnx, as written by python -m export")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="output folder, a new one")
    add("--rows", type=int, metavar="S",
        help="fixed number of cache rows, required by TensorRT (default: dynamic)")  # fmt: skip
    add("--vocab-size", type=int, metavar="V",
        help="number of tokens, if fewer than logits (default: the number of logits)")  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    refuse_first(
        (value is not None and not 1 <= value < 2**31, f"{option} {value} is out of range",
         f"Use 1 to {2**31 - 1}.")
        for option, value in (("--rows", args.rows), ("--vocab-size", args.vocab_size))
    )  # fmt: skip
    refuse_first(
        (not (args.graph / name).is_file(), f"{args.graph} has no {name}",
         "Give the target/ folder that python -m export wrote.")
        for name in (GRAPH_FILE, WEIGHTS_FILE)
    )  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        args.out.mkdir()
    except FileExistsError:
        raise OutriderError(
            "disk", f"{args.out} already exists", "Name another folder, or remove it."
        ) from None
    try:
        _write(args)
    except BaseException:
        shutil.rmtree(args.out, ignore_errors=True)
        raise
    return 0


def _write(args: argparse.Namespace) -> None:
    import onnx_ir as ir  # late: it imports torch, which --help should not wait for

    from .verify import ALL_TOKENS, append_verify

    try:
        model = ir.load(args.graph / GRAPH_FILE)
    except Exception as error:  # noqa: BLE001 - protobuf's own class, not a dependency of ours
        cause = f"{args.graph / GRAPH_FILE} is not an ONNX file ({first_line(error)})"
        raise OutriderError("option", cause, "Export it again.") from None
    append_verify(model, args.vocab_size or ALL_TOKENS)
    if args.rows:
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.name and value.name.startswith(("key_", "value_")):
                assert value.shape is not None
                slots, heads, _, width = value.shape
                value.shape = ir.Shape([slots, heads, args.rows, width])
    # The weights are not loaded: the graph refers to the file beside it, which is copied.
    ir.save(model, args.out / GRAPH_FILE)
    shutil.copyfile(args.graph / WEIGHTS_FILE, args.out / WEIGHTS_FILE)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: graph with Verify, {size / 2**20:,.1f} MiB", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
