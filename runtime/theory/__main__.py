"""`python -m runtime.theory`: the gain of speculation, tabulated or measured on a bundle."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import inf

from ..files.errors import (
    PACKAGE,
    CommandParser,
    OutriderError,
    check_stdout,
    defer_interrupts,
    refuse_first,
    run_command,
)
from .formulas import MAX_GAMMA, best_gamma, oracle, table


def parser() -> argparse.ArgumentParser:
    command = CommandParser(
        prog=f"python -m {PACKAGE}.theory",
        description="Compute what speculative decoding gains, by the formulas of Leviathan et al. "
        "2023:\nfor a given acceptance and cost, or for those measured on a bundle.",
        epilog="examples:\n"
        f"  python -m {PACKAGE}.theory --alpha 0.8 --cost 0.05\n"
        f"  python -m {PACKAGE}.theory --engines build/demo --prompt 'def main():' "
        "--prompt 'import os'",
    )
    add = command.add_argument
    add("--alpha", type=float, metavar="A", help="acceptance rate of draft tokens, 0 to 1")
    add("--cost", type=float, metavar="C", help="c: time of a draft step / time of a plain step")
    add("--engines", metavar="DIR", help="measure both on this bundle instead, with your prompts")
    add("--prompt", action="append", metavar="TEXT", help="prompt to measure on, repeatable; "
        "acceptance depends on it, so use your own")  # fmt: skip
    add("--temperature", type=float, metavar="T", help="sampling temperature (default: 0)")
    add("--tokens", type=int, metavar="N", help="tokens per prompt and gamma (default: 96)")
    add("--max-gamma", type=int, metavar="G", help="largest gamma without --engines (default: 16)")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    unused, preposition = ("prompt", "temperature", "tokens"), "without"
    if args.engines:
        unused, preposition = ("alpha", "cost", "max_gamma"), "with"
    refuse_first([
        (not args.engines and None in (args.alpha, args.cost),
         "--alpha and --cost, or --engines, are required", "See --help."),
        *((getattr(args, name) is not None,
           f"--{name.replace('_', '-')} has no meaning {preposition} --engines",
           "Leave one of them out.") for name in unused),
        (args.engines and not args.prompt, "--engines needs prompts to measure on",
         "Add --prompt, once or more."),
    ])  # fmt: skip
    check_stdout()
    if args.engines:
        with defer_interrupts():
            from .measure import recommend
        tokens = 96 if args.tokens is None else args.tokens
        print(recommend(args.engines, args.prompt, args.temperature or 0.0, tokens))
        return 0
    limit = 16 if args.max_gamma is None else args.max_gamma
    if not (0 <= args.alpha <= 1 and 0 <= args.cost < inf and 1 <= limit <= MAX_GAMMA):
        raise OutriderError(
            "option",
            f"alpha={args.alpha}, cost={args.cost}, max-gamma={limit}: one of them is out of range",
            f"Use 0 <= alpha <= 1, 1 <= max-gamma <= {MAX_GAMMA}, and a finite cost >= 0.",
        )
    verify = [1.0] * (limit + 1)  # a verification costs as much as a plain step
    print(table(args.alpha, args.cost, verify))
    gamma, gain = best_gamma(args.alpha, args.cost, verify)
    print(f"best   gamma {gamma}: {gain:.2f}x" if gamma else "best   plain decoding, --gamma 0")
    print(f"bound  {oracle(args.alpha, args.cost):.2f}x, if gamma were chosen by an oracle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
