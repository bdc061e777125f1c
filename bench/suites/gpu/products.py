"""python -m bench.suites.gpu.products: what torch's products of 8 and 4 bits would bring on a GPU.

No bundle has them: of a matrix that is dequantised before cuBLAS multiplies, Inductor writes a
dense copy in each call. torch has two products that read levels: `_weight_int8pack_mm` with a scale
a row, and `_weight_int4pack_mm` with one for 32 numbers, as our own levels have it. Here they are
held against the dequantised product and timed beside bfloat16, in the shapes of Llama 8B.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.files.errors import CommandParser, first_line, run_command

from .constructed import LLAMA_8B
from .kernel import copy_bandwidth, seconds, warm
from .suite import save

if TYPE_CHECKING:
    import torch

    Product = Callable[[torch.Tensor], torch.Tensor]

GROUP = 32  # numbers that share a scale of 4 bits
TOKENS = (1, 5, 9)  # of a call: plain, and verifications of 4 and 8 drafts
HIDDEN, INNER = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
SHAPES = ((INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN, HIDDEN))  # [N outputs, K inputs]
BYTES = 1 << 29  # of matrices in turn, so that none is in the cache
REPLAYS = 5
WORST = 0.02  # relative error: of sums in bfloat16, in another order


def full(n: int, k: int, device: str) -> tuple[Product, torch.Tensor]:
    """x -> x W^T, and W [N, K], which is random."""
    import torch

    dense = torch.randn(n, k, device=device).bfloat16()
    return lambda x: x @ dense.T, dense


def int8(n: int, k: int, device: str) -> tuple[Product, torch.Tensor]:
    import torch

    levels = torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8)
    scales = (torch.rand(n, device=device) + 0.5).bfloat16() / 128
    dense = levels.bfloat16() * scales[:, None]
    return lambda x: torch._weight_int8pack_mm(x, levels, scales), dense


def int4(n: int, k: int, device: str) -> tuple[Product, torch.Tensor]:
    import torch

    levels = torch.randint(0, 16, (n, k), device=device, dtype=torch.int32)
    scales = (torch.rand(k // GROUP, n, device=device) + 0.5).bfloat16() / 8
    dense = (levels - 8).bfloat16() * scales.T.repeat_interleave(GROUP, 1)
    given = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
    if device == "cpu":
        there = torch._convert_weight_to_int4pack_for_cpu(levels, 1)
        return lambda x: torch._weight_int4pack_mm_for_cpu(x, there, GROUP, given), dense
    pairs = (levels[:, ::2] << 4 | levels[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(pairs, 8)
    return lambda x: torch._weight_int4pack_mm(x, packed, GROUP, given), dense


KINDS = {"bfloat16": (full, 16), "int8": (int8, 8), "int4": (int4, 5)}  # and bits of a number


def measured(
    n: int, k: int, tokens: int, device: str, bandwidth: float | None = None
) -> dict[str, Any]:
    """Of each kind: the error beside the dequantised product in float32; on a GPU microseconds, and
    the share of a copy's bandwidth at which the matrix was read. What cannot run says why."""
    import torch

    found: dict[str, Any] = {"N": n, "K": k, "tokens": tokens}
    x = torch.randn(tokens, k, device=device).bfloat16()
    for name, (make, bits) in KINDS.items():
        try:
            product, dense = make(n, k, device)
            right = x.float() @ dense.float().T
            error = ((product(x).float() - right).norm() / right.norm()).item()
            found[name] = {"error": round(error, 5), "right": error <= WORST}
            if bandwidth:
                size = n * k * bits / 8
                several = [make(n, k, device)[0] for _ in range(max(2, int(BYTES / size)))]
                spent = _each(several, x)
                share = size / spent / bandwidth
                found[name] |= {"us": round(1e6 * spent, 2), "of_copy_bandwidth": round(share, 3)}
        except Exception as error:  # noqa: BLE001 - an operator that this version or GPU lacks
            found[name] = {"reason": first_line(error)}
    return found


def _each(products: Sequence[Product], x: torch.Tensor) -> float:
    """Seconds of one, the median of replays of a graph of all."""
    import torch

    for product in products[:2]:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    warm(graph.replay)
    return statistics.median(seconds(graph.replay) for _ in range(REPLAYS)) / len(products)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = CommandParser(prog="python -m bench.suites.gpu.products", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")

    def command() -> int:
        args = parser.parse_args(argv)
        bandwidth = copy_bandwidth()
        report: dict[str, Any] = {"copy_gb_s": round(bandwidth / 1e9, 1), "products": []}
        for n, k in SHAPES:
            for tokens in TOKENS:
                report["products"].append(measured(n, k, tokens, "cuda", bandwidth))
                save(args.json, report)
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
