"""python -m bench.suites.gpu.kernel: check and time the sampling kernel on a GPU.

Rounds run inside a CUDA graph, over so many sets of logits that they exceed twice the L2 cache and
every round reads from memory. The floor is the time to read the necessary bytes at the bandwidth of
a copy measured in the same run. Everything is compared with the NumPy reference before it is timed.
Memory and graphs are PyTorch's.

Without options, runs a few small rounds of every rule, for use under a sanitizer.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.files.errors import CommandParser, run_command
from runtime.gpu import launch
from runtime.gpu.launch import Device, KernelBuffers, KernelSizes, Plan
from runtime.gpu.rounds import flags_of
from runtime.sampling import kernel
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

from ..kernel.rounds import CONTEXT, RULES, VARIANTS, Outcome, Round, disagreements
from .profiling import profile_kernels
from .suite import goal, save_report

DEVICE = "cuda"  # PyTorch's name for the device
REPLAYS = 5  # samples of each graph; the median is used
PASSES = 4  # of a graph over all sets, so that its launch does not count
WARM_UP_SECONDS = 0.1  # of the same work beforehand, because an idle GPU has low clocks
COPY_BYTES = 1 << 31
CHECKED_SLOTS = 8  # slots of a round that are compared with the reference, which is slow
SANITIZER_SHAPES = ((2500, 3), (32_001, 2))  # V and B of the rounds for a sanitizer
# Goals in microseconds for bfloat16, by (V, gamma, B).
GOALS_US = {(128_256, 5, 1): 6.0, (128_256, 5, 8): 12.0, (128_256, 8, 32): 40.0}
PEAKED = ("token", "coupled", "top-k 50, top-p 0.9", "top-p 0.9")  # timed on peaked rows too
SIZES = list(itertools.product((32_000, 128_256, 151_936), (5, 8), (1, 8, 32)))


@dataclass(frozen=True)
class KernelShape:
    vocab_size: int
    gamma: int
    batch: int
    dtype: str = "bfloat16"
    peaked: bool = False  # as a model's rows mostly are: few tokens have nearly all the mass

    @property
    def row_bytes(self) -> int:
        return self.vocab_size * (4 if self.dtype == "float32" else 2)


class DeviceRound:
    """Rounds of B slots on the GPU: `sets` sets of logits, each with drawn drafts.

    The draft rows are near the target rows, so that some drafts are accepted and some rejected. A
    nucleus of 0.9 has about 2,000 tokens, or 10 if the shape is peaked.
    """

    def __init__(self, device: Device, shape: KernelShape, params: SamplingParams, sets: int):
        import torch

        self.torch, self.device, self.shape, self.sets = torch, device, shape, sets
        self.params = params
        batch, gamma, vocab_size = shape.batch, shape.gamma, shape.vocab_size
        generator = torch.Generator(device=DEVICE)
        generator.manual_seed(0)
        self.target, self.draft = [], []
        for _ in range(sets):
            size = (batch, gamma + 1, vocab_size)
            target = 2.5 * torch.randn(size, generator=generator, device=DEVICE)
            if shape.peaked:
                favourites = torch.randperm(vocab_size, generator=generator, device=DEVICE)[:64]
                target[..., favourites] += torch.linspace(12, 4, 64, device=DEVICE)
            noise = torch.randn(size, generator=generator, device=DEVICE)[:, :gamma]
            dtype = getattr(torch, shape.dtype)
            self.target.append(target.to(dtype))
            self.draft.append((target[:, :gamma] + 0.7 * noise).to(dtype))
        self.context = np.random.default_rng(0).integers(0, vocab_size, CONTEXT)
        self._context = self._bytes(self.context)
        slots = np.zeros(batch, kernel.SLOT)
        for b in range(batch):
            kernel.fill_slot(slots, b, SlotSampling(replace(params, seed=b), gamma, CONTEXT, b))
            if params.repetition_penalty != 1:
                slots[b]["context"] = self._context.data_ptr()
                slots[b]["context_length"] = CONTEXT
        self._slots = self._bytes(slots)
        flags = flags_of(Request([0], params))
        self.sizes = KernelSizes(batch, gamma, vocab_size, vocab_size, flags, 0)
        # Each set has its own drafts, rows, verdicts and ratios; the workspace is shared.
        self._workspace = self._bytes(np.zeros(launch.workspace_size(self.sizes), np.uint8))
        kinds = np.dtype(np.int64), kernel.ROW, kernel.VERDICT, np.dtype(np.float64)
        counts = batch * gamma, batch * gamma, batch, batch * gamma
        self._sets = [
            [self._bytes(np.zeros(n, kind)) for kind, n in zip(kinds, counts, strict=True)]
            for _ in range(sets)
        ]
        self.draws = [self._plan_draw(s, i) for s in range(sets) for i in range(gamma)]
        self.verifies = [self._plan_verify(s) for s in range(sets)]
        self.launch(self.draws)

    def _bytes(self, array: npt.NDArray[Any]) -> Any:
        """A copy on the device, aligned to 256 bytes."""
        memory = self.torch.zeros(array.nbytes + 256, device=DEVICE, dtype=self.torch.uint8)
        skip = -memory.data_ptr() % 256
        copied = memory[skip : skip + array.nbytes]
        copied.copy_(self.torch.from_numpy(array.view(np.uint8).copy()))
        return copied

    def _buffers(self, s: int) -> KernelBuffers:
        drafts, rows, verdicts, ratios = (tensor.data_ptr() for tensor in self._sets[s])
        workspace = self._workspace.data_ptr()
        return KernelBuffers(self._slots.data_ptr(), drafts, rows, verdicts, ratios, workspace)

    def _logits(self, tensor: Any) -> kernel.Logits:
        shape, size = self.shape, tensor.element_size()
        strides = (tensor.stride(0) * size, tensor.stride(1) * size)
        return kernel.Logits(
            tensor.data_ptr(), *strides, shape.vocab_size, kernel.DTYPES.index(shape.dtype)
        )

    def _plan_draw(self, s: int, step: int) -> Plan:
        logits = self._logits(self.draft[s][:, step:])
        return launch.plan_draw(self.sizes, logits, self._buffers(s), step)

    def _plan_verify(self, s: int) -> Plan:
        logits = self._logits(self.target[s]), self._logits(self.draft[s])
        return launch.plan_verify(self.sizes, *logits, self._buffers(s))

    def launch(self, plans: Sequence[Plan], wait: bool = True) -> None:
        for plan in plans:
            self.device.launch(plan, self.torch.cuda.current_stream().cuda_stream)
        if wait:
            self.torch.cuda.synchronize()

    def drafts(self, s: int = 0) -> npt.NDArray[np.int64]:
        """int64 [B, gamma], on the host."""
        raw: npt.NDArray[np.int64] = self._sets[s][0].cpu().numpy().view(np.int64)
        return raw.reshape(self.shape.batch, self.shape.gamma)

    def verdicts(self, s: int = 0) -> npt.NDArray[Any]:
        """kernel.VERDICT [B], on the host, of the verification that was launched last."""
        verdicts: npt.NDArray[Any] = self._sets[s][2].cpu().numpy().view(kernel.VERDICT)
        return verdicts

    def disagreements(self, s: int = 0) -> list[int]:
        """The slots, among the first `CHECKED_SLOTS`, in which the GPU differs from the
        reference."""
        self.launch([self.verifies[s]])
        target, draft = (
            x[s][:CHECKED_SLOTS].float().cpu().numpy() for x in (self.target, self.draft)
        )
        round_ = Round((target, draft), self.params, context=self.context)
        verdicts = self.verdicts(s)[["accepted", "token"]].tolist()
        outcomes: list[Outcome] = [
            (drafts, *verdict)
            for drafts, verdict in zip(self.drafts(s).tolist(), verdicts, strict=True)
        ]
        return disagreements(round_, outcomes[:CHECKED_SLOTS])

    def bytes_read(self) -> int:
        """Bytes that a verification must read: all target rows; with the block rule also the
        draft's."""
        rows = self.shape.gamma + 1 + (self.shape.gamma if self.sizes.flags & launch.BLOCK else 0)
        return self.shape.batch * rows * self.shape.row_bytes

    def microseconds(self, plans: Sequence[Plan]) -> dict[str, float]:
        """Time per set of launching these plans, which cover all sets: median, low, high."""
        torch = self.torch
        self.launch(plans)  # modules are loaded lazily, which must not happen during a capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(PASSES):
                self.launch(plans, wait=False)
        warm_up(graph.replay)
        times = sorted(
            1e6 * gpu_seconds(graph.replay) / (PASSES * self.sets) for _ in range(REPLAYS)
        )
        figures = {"us": times[len(times) // 2], "low": times[0], "high": times[-1]}
        return {name: round(value, 3) for name, value in figures.items()}

    def launch_microseconds(self, plans: Sequence[Plan]) -> dict[str, float]:
        """Median time of each kernel of these plans, by its name, without the gaps between them."""
        times = defaultdict[str, list[float]](list)
        for found in profile_kernels(lambda: self.launch(plans)):
            times[found.name].append(found.end - found.begin)
        return {name: round(float(np.median(each)), 2) for name, each in times.items()}


def copy_bandwidth() -> float:
    """Bytes read and written per second by the fastest of ten large copies."""
    import torch

    # Random data, because zeros in fresh memory may be copied faster.
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    warm_up(lambda: target.copy_(source))
    return 2 * COPY_BYTES / min(gpu_seconds(lambda: target.copy_(source)) for _ in range(10))


def warm_up(work: Callable[[], object]) -> None:
    """Repeat `work` for `WARM_UP_SECONDS` seconds."""
    import torch

    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        work()
        torch.cuda.synchronize()


def gpu_seconds(work: Callable[[], object]) -> float:
    """Time of `work` by the GPU's own clock."""
    import torch

    cuda: Any = torch.cuda  # events have no annotations
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    cuda.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds


def measure(device: Device, name: str, shape: KernelShape, bandwidth: float) -> dict[str, Any]:
    """Check and time one variant at one shape; returns microseconds of a verification and of gamma
    draws."""
    import torch

    cache = torch.cuda.get_device_properties(0).L2_cache_size
    # Based on the draws, which read less than a verification.
    drafts = shape.batch * shape.gamma * shape.row_bytes
    round_ = DeviceRound(device, shape, VARIANTS[name], max(2, -(-2 * cache // drafts)))
    wrong = round_.disagreements()
    verify = round_.microseconds(round_.verifies)
    accepted = float(np.mean(round_.verdicts()["accepted"]))  # a draw overwrites the verdicts
    draws = round_.microseconds(round_.draws)
    if bad := [s for s in range(round_.sets) if round_.verdicts(s)["status"].any()]:
        raise RuntimeError(f"{name} {shape}: slots failed in sets {bad}")
    size = round_.bytes_read()
    floor = 1e6 * size / bandwidth
    result = {
        "name": name, "V": shape.vocab_size, "gamma": shape.gamma, "B": shape.batch,
        "dtype": shape.dtype, "peaked": shape.peaked, "sets": round_.sets,
        "disagree": len(wrong), "bytes": size,
        "floor_us": round(floor, 3), "fraction_of_floor": round(floor / verify["us"], 3),
        "verify": verify, "gamma_draws": draws,
        "mean_accepted": round(accepted, 3),
    }  # fmt: skip
    limit = GOALS_US.get((shape.vocab_size, shape.gamma, shape.batch))
    if limit is not None and name == "token":
        result["goal"] = goal(verify["us"], limit)
        result["launches_us"] = round_.launch_microseconds(round_.verifies)
    return result


def time_all(
    jobs: Sequence[tuple[str, KernelShape]],
    on_result: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """Measure all variants and shapes. on_result: called with the report after each, because a run
    may be cut off. Raises OutriderError("backend")."""
    import torch

    device, bandwidth, gpu = Device(), copy_bandwidth(), torch.cuda.get_device_properties(0)
    report: dict[str, Any] = {
        "gpu": gpu.name, "l2_mib": gpu.L2_cache_size / 2**20, "cuda": torch.version.cuda,
        "copy_gb_s": round(bandwidth / 1e9, 1), "image": device.image.name,
        "disagree": 0, "results": [],
    }  # fmt: skip
    for name, shape in jobs:
        result = measure(device, name, shape, bandwidth)
        print(json.dumps(result), file=sys.stderr, flush=True)
        report["results"].append(result)
        report["disagree"] += result["disagree"]
        on_result(report)
    return report


def run_each_rule() -> None:
    """Run a few small rounds of every rule."""
    device = Device()
    for vocab_size, batch in SANITIZER_SHAPES:
        for dtype in ("float32", "bfloat16"):
            for params in VARIANTS.values():
                round_ = DeviceRound(device, KernelShape(vocab_size, 3, batch, dtype), params, 1)
                round_.launch(round_.verifies)
                assert not round_.verdicts()["status"].any()


def jobs(quick: bool) -> list[tuple[str, KernelShape]]:
    """Variants and shapes: those with goals first, because a run may be cut off, and every variant
    in one shape; or, if not quick, the rules in all other shapes."""
    large = KernelShape(151_936, 5, 1)
    found = [("token", KernelShape(*size)) for size in GOALS_US]
    found += [(variant, large) for variant in VARIANTS]
    found += [(variant, replace(large, peaked=True)) for variant in PEAKED]
    if not quick:
        every = [(rule, KernelShape(*size)) for rule in RULES for size in SIZES]
        return [job for job in every if job not in found]
    return list(dict.fromkeys(found))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = CommandParser(prog="python -m bench.suites.gpu.kernel", description=__doc__)
    add = parser.add_argument
    add("--times", type=Path, metavar="FILE",
        help="check and time the kernel, and write the figures to this file")  # fmt: skip
    add(
        "--quick",
        action="store_true",
        help="with --times: the shapes with goals and every rule in one, "
        "instead of the rules in all other shapes",
    )

    def command() -> int:
        args = parser.parse_args(argv)
        if args.times is None:
            run_each_rule()
            return 0
        report = time_all(jobs(args.quick), lambda found: save_report(args.times, found))
        return 1 if report["disagree"] else 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
