"""What speculative decoding can gain: the formulas of Leviathan, Kalman, Matias 2023, as functions
and as a tool.

`python -m runtime.theory --alpha 0.8 --cost 0.05` tabulates them; with `--engines DIR` acceptance
and costs are measured on the bundle (`runtime/measure.py`). All take a token's acceptance for
independent of the others (section 3.1), and times in units of a plain step of the target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import CommandParser, OutriderError, run_command
from .warping import Distribution, SamplingParams, warp

PACKAGE = __package__ or "runtime"
MOST = 64


def expected_tokens(alpha: float, gamma: float) -> float:
    """Of a round, the correction or bonus token included: equation (1)."""
    return gamma + 1 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: float, cost: float, verify: float = 1.0) -> float:
    """Times as fast as plain decoding: Theorem 3.8, which has `verify` 1.

    cost: c, of a draft step. verify: of the verification of gamma + 1 tokens.
    """
    return expected_tokens(alpha, gamma) / (gamma * cost + verify)


def operations(alpha: float, gamma: float, cost: float) -> float:
    """Arithmetic operations, as a multiple of plain decoding's: Theorem 3.11. cost: ĉ, the draft's
    operations for a token."""
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(
    alpha: float, cost: float, verify: Sequence[float] | None = None, most: int = MOST
) -> tuple[int, float]:
    """The gamma up to `most` of the largest speedup, and that; 0 and 1 where nothing gains.

    verify[gamma]: what the verification of gamma + 1 tokens costs; None takes 1 for all.
    Section 3.5.
    """
    if verify is not None:
        most = min(most, len(verify) - 1)
    best = (0, 1.0)
    for gamma in range(1, most + 1):
        gain = speedup(alpha, gamma, cost, verify[gamma] if verify is not None else 1.0)
        if gain > best[1]:
            best = (gamma, gain)
    return best


def oracle(alpha: float, cost: float) -> float:
    """The bound of section 3.5 on any choice of gamma: as many tokens are drafted as will be
    accepted, alpha / (1 - alpha) on average, and a round gives one more."""
    return float("inf") if alpha >= 1 and cost == 0 else 1 / (1 - alpha + cost * alpha)


def break_even(overhead: float, gain: float) -> float:
    """Output tokens from which on speculation pays.

    overhead: what it costs once, in plain steps (the draft's prefill). gain: the speedup after
    that. Infinite where there is none.
    """
    return overhead / (1 - 1 / gain) if gain > 1 else float("inf")


def acceptance(target: npt.NDArray[Any], draft: npt.NDArray[Any], lenience: float = 1.0) -> float:
    """alpha of two sets of distributions [N, V]: the mean over N of the sum of min(p / l, q).

    Corollary 3.6, and appendix A.5 for a lenience l below 1.
    """
    if target.shape != draft.shape or target.ndim != 2 or not 0 < lenience <= 1:
        raise ValueError(f"shapes {target.shape} and {draft.shape}, lenience {lenience}")
    return float(np.minimum(target / lenience, draft).sum(1).mean())


def acceptance_of_logits(
    target: npt.NDArray[Any], draft: npt.NDArray[Any], params: SamplingParams
) -> float:
    """alpha of two sets of raw logits [N, V] under sampling options; at temperature 0 the share of
    rows in which the draft's argmax is the target's, or with lenience l has p(x) >= l max p."""
    if params.temperature == 0 and params.lenience < 1:
        rows = np.arange(len(target))
        drawn = target[rows, draft.argmax(1)]
        return float((drawn >= target.max(1) + np.log(params.lenience)).mean())
    p, q = (
        np.stack([_probabilities(warp(row, params)) for row in logits])
        for logits in (target, draft)
    )
    return acceptance(p, q, params.lenience)


def _probabilities(row: Distribution) -> npt.NDArray[np.float64]:
    if row.weights is not None:
        return row.weights.astype(np.float64) / row.total
    point = np.zeros(row.vocab_size)
    point[row.point_mass] = 1
    return point


# The tool


def table(alpha: float, cost: float, verify: Sequence[float] | None, gammas: Sequence[int]) -> str:
    """A line for each gamma: tokens of a round, speedup, operations."""
    lines = ["gamma  tokens a round  speedup  operations (c^ = c)"]
    for gamma in gammas:
        width = verify[gamma] if verify is not None else 1.0
        lines.append(
            f"{gamma:>5}  {expected_tokens(alpha, gamma):>14.2f}  "
            f"{speedup(alpha, gamma, cost, width):>6.2f}x  "
            f"{operations(alpha, gamma, cost):>9.2f}x"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="outrider-theory" if PACKAGE == "outrider" else f"python -m {PACKAGE}.theory",
        description="What speculative decoding gains, by the formulas of Leviathan et al. 2023: "
        "for an acceptance and a cost, or for a bundle whose own are measured.",
        epilog="examples:\n"
        f"  python -m {PACKAGE}.theory --alpha 0.8 --cost 0.05\n"
        f"  python -m {PACKAGE}.theory --engines build/demo --prompt 'def main():' "
        "--prompt 'import os'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--alpha", type=float, metavar="A", help="acceptance of a draft token, 0 to 1")
    add("--cost", type=float, metavar="C", help="c: a draft step's time over a plain step's")
    add("--engines", metavar="DIR", help="measure both on this bundle instead, with your prompts")
    add("--prompt", action="append", default=[], metavar="TEXT", help="repeatable; takes part in "
        "the acceptance, so of your own kind")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T", help="of the measurement, default 0")
    add("--tokens", type=int, default=96, metavar="N", help="generated for each prompt and gamma")
    add("--overhead", type=float, metavar="O",
        help="plain steps that speculation costs once (the draft's prefill), for the output "
        "length from which on it pays")  # fmt: skip
    add("--max-gamma", type=int, default=16, metavar="G", help="without a bundle; default 16")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    given = args.alpha is not None or args.cost is not None
    if bool(args.engines) == given or (given and None in (args.alpha, args.cost)):
        raise _option("--alpha and --cost, or --engines, are needed", "See --help.")
    if args.engines:
        from .measure import recommend  # opens a bundle

        if not args.prompt:
            raise _option("--engines measures on prompts", "Add --prompt, once or more often.")
        print(recommend(args.engines, args.prompt, args.temperature, args.tokens))
        return 0
    if not (0 <= args.alpha <= 1 and args.cost >= 0 and 1 <= args.max_gamma <= MOST):
        raise _option(
            f"alpha={args.alpha}, cost={args.cost}, max-gamma={args.max_gamma} are out of range",
            f"Use 0 <= alpha <= 1, cost >= 0, 1 <= max-gamma <= {MOST}.",
        )
    print(table(args.alpha, args.cost, None, range(1, args.max_gamma + 1)))
    gamma, gain = best_gamma(args.alpha, args.cost, most=args.max_gamma)
    print(f"best   gamma {gamma}: {gain:.2f}x" if gamma else "best   plain decoding, --gamma 0")
    print(f"bound  {oracle(args.alpha, args.cost):.2f}x, if gamma were chosen by an oracle")
    if args.overhead is not None:
        print(f"pays   from {break_even(args.overhead, gain):.0f} output tokens on")
    return 0


def _option(cause: str, remedy: str) -> OutriderError:
    return OutriderError("option", cause, remedy)


if __name__ == "__main__":
    sys.exit(main())
