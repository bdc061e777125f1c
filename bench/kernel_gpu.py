"""The sampling kernel's time on a GPU: rounds inside a CUDA graph, and Transformers' beside them.

Hot: one set of logits, which the L2 cache holds where it can. Rotating: as many sets as are larger
than twice the L2 cache, so that every round reads from memory. The floor is what must be read, at
the bandwidth of a copy measured in the same run. Memory and graphs are PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.files.errors import run_command
from runtime.gpu import launch as cuda_kernel
from runtime.gpu.launch import Buffers, Device, DeviceLogits, Plan, Sizes
from runtime.sampling import kernel
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams

from .on_gpu import flags_of, open_gpu
from .rounds import TOKEN, VARIANTS, Round, disagreements, transformers_call

WHERE = "cuda"  # PyTorch's name of the memory
REPLAYS = 5  # samples of each graph; the median counts
GRAPH_SECONDS = 0.002  # of work in one replay, so that the launch of the graph does not count
COPY_BYTES = 1 << 31
CHECKED = (127, 2500, 32_000, 128_256, 151_936)  # V of the rounds that are compared
WATCHED = ((2500, 3), (32_001, 2))  # V and B of those that a sanitizer sees
GOALS_US = {(1, 5): 6.0, (8, 5): 12.0, (32, 8): 40.0}  # KERNEL.md: V = 128,256, bfloat16


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    gamma: int
    batch: int
    dtype: str = "bfloat16"

    @property
    def row_bytes(self) -> int:
        return self.vocab_size * (4 if self.dtype == "float32" else 2)


class DeviceRound:
    """Rounds of B slots on the GPU: `sets` of logits, each with its drafts drawn.

    Peaked rows with draft rows near them, so that some drafts stand and some fall.
    """

    def __init__(
        self,
        device: Device,
        shape: Shape,
        params: SamplingParams,
        sets: int,
    ):
        import torch

        self.torch, self.device, self.shape, self.sets = torch, device, shape, sets
        batch, gamma = shape.batch, shape.gamma
        dtype = getattr(torch, shape.dtype)
        generator = torch.Generator(device=WHERE)
        generator.manual_seed(0)

        def normal(*size: int) -> Any:
            return torch.randn(size, generator=generator, device=WHERE)

        self.target, self.draft = [], []
        for _ in range(sets):
            target = 2.5 * normal(batch, gamma + 1, shape.vocab_size)
            noise = normal(batch, gamma, shape.vocab_size)
            self.target.append(target.to(dtype))
            self.draft.append((target[:, :gamma] + 0.7 * noise).to(dtype))
        context = torch.randint(0, shape.vocab_size, (500,), device=WHERE, generator=generator)
        self._context = context.to(torch.int64)
        slots = np.zeros(batch, kernel.SLOT)
        for b in range(batch):
            place = SlotSampling(replace(params, seed=b), gamma, 500, b)
            kernel.fill_slot(slots, b, place)
            if params.repetition_penalty != 1:
                slots[b]["context"], slots[b]["context_length"] = self._context.data_ptr(), 500
        self._slots = self._bytes(slots.nbytes)
        self._slots.copy_(torch.from_numpy(slots.view(np.uint8).copy()))
        self.sizes = Sizes(batch, gamma, shape.vocab_size, shape.vocab_size, flags_of(slots), 0)
        # A set's drafts, rows and verdicts are its own; the workspace is everyone's.
        self._workspace = self._bytes(cuda_kernel.workspace_size(self.sizes))
        self._kept: list[Any] = []
        self.buffers = [self._make_buffers() for _ in range(sets)]
        self.draws = [[self._plan_draw(s, i) for i in range(gamma)] for s in range(sets)]
        self.verifies = [self._plan_verify(s) for s in range(sets)]
        for plans in self.draws:
            for plan in plans:
                device.launch(plan, self._stream())
        torch.cuda.synchronize()

    def _bytes(self, size: int) -> Any:
        memory = self.torch.zeros(max(1, size) + 256, device=WHERE, dtype=self.torch.uint8)
        skip = -memory.data_ptr() % 256
        return memory[skip : skip + size]

    def _make_buffers(self) -> Buffers:
        batch, gamma = self.shape.batch, self.shape.gamma
        sizes = (
            8 * batch * gamma,
            kernel.ROW.itemsize * batch * gamma,
            kernel.VERDICT.itemsize * batch,
            8 * batch * gamma,
        )
        memory = [self._bytes(size) for size in sizes]
        self._kept.append(memory)
        drafts, rows, verdicts, ratios = (tensor.data_ptr() for tensor in memory)
        workspace = self._workspace.data_ptr()
        return Buffers(self._slots.data_ptr(), drafts, rows, verdicts, ratios, workspace)

    def _logits(self, tensor: Any) -> DeviceLogits:
        shape, size = self.shape, tensor.element_size()
        strides = (tensor.stride(0) * size, tensor.stride(1) * size)
        return DeviceLogits(tensor.data_ptr(), *strides, shape.vocab_size, shape.dtype)

    def _plan_draw(self, s: int, step: int) -> Plan:
        logits = self._logits(self.draft[s][:, step:])
        return cuda_kernel.plan_draw(self.sizes, logits, self.buffers[s], step)

    def _plan_verify(self, s: int) -> Plan:
        target, draft = self._logits(self.target[s]), self._logits(self.draft[s])
        return cuda_kernel.plan_verify(self.sizes, target, draft, self.buffers[s], by_index=True)

    def _stream(self) -> int:
        stream: int = self.torch.cuda.current_stream().cuda_stream
        return stream

    def drafts(self, s: int = 0) -> np.ndarray[Any, Any]:
        """int64 [B, gamma], on the host."""
        raw: np.ndarray[Any, Any] = self._kept[s][0].cpu().numpy().view(np.int64)
        return raw.reshape(self.shape.batch, self.shape.gamma)

    def verdicts(self, s: int = 0) -> np.ndarray[Any, Any]:
        """kernel.VERDICT [B], on the host."""
        verdicts: np.ndarray[Any, Any] = self._kept[s][2].cpu().numpy().view(kernel.VERDICT)
        return verdicts

    def bytes_read(self) -> float:
        """Of one verification, the mean of the sets: all target rows, and for each rejection the
        draft's row. By the block rule the draft's rows too, whatever was accepted."""
        shape, total = self.shape, 0
        for s in range(self.sets):
            accepted = self.verdicts(s)["accepted"]
            block = bool(self.sizes.flags & cuda_kernel.BLOCK)
            total += shape.batch * (shape.gamma + 1)
            total += shape.batch * shape.gamma if block else int((accepted < shape.gamma).sum())
        return total * shape.row_bytes / self.sets

    # Times

    def microseconds(self, plans: list[list[Plan]]) -> dict[str, float]:
        """Of one element of `plans` inside a graph that runs through them: median, low, high."""
        torch = self.torch
        once = self._graph(plans, 1)
        passes = max(1, round(GRAPH_SECONDS / max(1e-7, _seconds(torch, once.replay))))
        graph = self._graph(plans, passes) if passes > 1 else once
        times = sorted(
            1e6 * _seconds(torch, graph.replay) / (passes * len(plans)) for _ in range(REPLAYS)
        )
        return {"us": times[len(times) // 2], "low": times[0], "high": times[-1]}

    def _graph(self, plans: list[list[Plan]], passes: int) -> Any:
        torch = self.torch
        for plan in plans[0]:
            self.device.launch(plan, self._stream())  # modules are loaded lazily: not in a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(passes):
                for group in plans:
                    for plan in group:
                        self.device.launch(plan, self._stream())
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def transformers(self, params: SamplingParams) -> float:
        """Microseconds of the same verification by Transformers, host waits included: processors,
        and `_speculative_sampling` slot by slot, for it takes one sequence."""
        import time

        torch = self.torch
        drafts = torch.from_numpy(self.drafts()).to(WHERE)
        call = transformers_call(self.target[0].float(), self.draft[0].float(), drafts, params)
        call()
        times = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return 1e6 * sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of the best of ten large copies."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=WHERE)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        best = min(best, _seconds(torch, lambda: target.copy_(source)))
    return 2 * COPY_BYTES / best


def _seconds(torch: Any, work: Callable[[], object]) -> float:
    """What the GPU takes for `work`, by its own clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds


def measure(
    device: Device, name: str, shape: Shape, params: SamplingParams, bandwidth: float
) -> dict[str, Any]:
    """One configuration: times in microseconds of a verification and of gamma draws."""
    import torch

    cache = torch.cuda.get_device_properties(0).L2_cache_size
    set_bytes = shape.batch * (2 * shape.gamma + 1) * shape.row_bytes
    round_ = DeviceRound(device, shape, params, sets=max(2, -(-2 * cache // set_bytes)))
    hot = round_.microseconds([[round_.verifies[0]]])
    rotating = round_.microseconds([[plan] for plan in round_.verifies])
    draws = round_.microseconds(round_.draws)
    bad = [s for s in range(round_.sets) if round_.verdicts(s)["status"].any()]
    if bad:
        raise RuntimeError(f"{name} {shape}: slots failed in the sets {bad}")
    size = round_.bytes_read()
    floor = 1e6 * size / bandwidth
    result = {
        "name": name, "V": shape.vocab_size, "gamma": shape.gamma, "B": shape.batch,
        "dtype": shape.dtype, "sets": round_.sets, "bytes": round(size),
        "floor_us": round(floor, 3), "fraction_of_floor": round(floor / rotating["us"], 3),
        "verify_hot": _rounded(hot), "verify_rotating": _rounded(rotating),
        "gamma_draws_rotating": _rounded(draws),
        "mean_accepted": round(float(np.mean(round_.verdicts()["accepted"])), 3),
    }  # fmt: skip
    plain = params.temperature > 0 and params.min_p == 0 and params.repetition_penalty == 1
    if plain and params.verify == "token":
        try:
            theirs = round_.transformers(params)
        except ImportError:
            return result
        result["transformers_us"] = round(theirs, 1)
        result["less_time_than_transformers"] = round(1 - rotating["us"] / theirs, 4)
    return result


def _rounded(times: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in times.items()}


def line(result: dict[str, Any]) -> str:
    hot, rotating, draws = (
        result[name]["us"] for name in ("verify_hot", "verify_rotating", "gamma_draws_rotating")
    )
    text = (
        f"{result['name']:20} V {result['V']:7,} gamma {result['gamma']} B {result['B']:2} "
        f"{result['dtype']}: hot {hot:.2f} us, rotating {rotating:.2f} us, "
        f"floor {result['floor_us']:.2f} us ({result['fraction_of_floor']:.0%} of it); "
        f"draws {draws:.2f} us"
    )
    if "transformers_us" in result:
        text += f"; Transformers {result['transformers_us']:.0f} us"
    return text


def shapes(vocabularies: Any, gammas: Any, batches: Any) -> Iterator[Shape]:
    for vocab_size in vocabularies:
        for gamma in gammas:
            for batch in batches:
                yield Shape(vocab_size, gamma, batch)


def check(quick: bool = False) -> int:
    """Draws and verifications of fresh random logits, by every rule and filter, on the GPU and by
    the NumPy reference; the number of slots that disagree."""
    library = open_gpu()
    disagree = 0
    for vocab_size in CHECKED[1::3] if quick else CHECKED:
        for name, params in VARIANTS.items():
            round_ = Round(vocab_size, 5, 4, params, library=library)  # type: ignore[arg-type]
            wrong = disagreements(round_, round_.kernel_outcomes())
            if wrong:
                print(f"{name} V {vocab_size}: slots {wrong} disagree", file=sys.stderr)
            disagree += len(wrong)
    return disagree


def describe() -> dict[str, Any]:
    """What PyTorch says of the GPU, and a copy's bandwidth."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size // 2**20,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "copy_gb_s": round(copy_bandwidth() / 1e9, 1),
    }


def times(
    jobs: list[tuple[SamplingParams, str, Shape]],
    save: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """Every configuration's figures, the bandwidth and the goals. save: called with what there is
    after each, for a run may be cut off."""
    device, bandwidth = Device(), copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.0f} GB/s, {device.image.name}", file=sys.stderr)
    results: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "copy_gb_s": round(bandwidth / 1e9, 1), "image": device.image.name, "goals": {},
        "results": results,
    }  # fmt: skip
    for params, name, shape in jobs:
        results.append(measure(device, name, shape, params, bandwidth))
        print(line(results[-1]), file=sys.stderr, flush=True)
        report["goals"] = goals(results)
        save(report)
    for name, goal in report["goals"].items():
        print(f"{name}: {goal['us']:.2f} us, goal {goal['limit_us']:.0f}")
    return report


def goals(results: list[dict[str, Any]]) -> dict[str, Any]:
    """KERNEL.md's goals: microseconds, the limit, and whether it is met."""
    found = {}
    for result in results:
        limit = GOALS_US.get((result["B"], result["gamma"]))
        if limit and (result["name"], result["V"]) == ("token", 128_256):
            us = result["verify_rotating"]["us"]
            key = f"V 128256 gamma {result['gamma']} B {result['B']}"
            found[key] = {"us": us, "limit_us": limit, "met": us <= limit}
    return found


def one_of_each() -> int:
    """A few small rounds of every rule, for a sanitizer or a profiler to watch."""
    device = Device()
    for vocab_size, batch in WATCHED:
        for dtype in ("float32", "bfloat16"):
            for params in VARIANTS.values():
                round_ = DeviceRound(device, Shape(vocab_size, 3, batch, dtype), params, 1)
                device.launch(round_.verifies[0])
                round_.torch.cuda.synchronize()
                assert not round_.verdicts()["status"].any()
    return 0


def profiled(vocab_size: int, gamma: int, batch: int) -> int:
    """One verification again and again, for a profiler to watch."""
    device = Device()
    round_ = DeviceRound(device, Shape(vocab_size, gamma, batch), TOKEN, 2)
    for i in range(6):
        device.launch(round_.verifies[i % 2])
    round_.torch.cuda.synchronize()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the kernels for a tool that watches them.")
    parser.add_argument("--profile", nargs=3, type=int, metavar=("V", "GAMMA", "B"))
    parser.add_argument("--describe", type=Path, help="write what the GPU is to this file instead")
    arguments = parser.parse_args()
    if arguments.describe:
        arguments.describe.write_text(json.dumps(describe()) + "\n")
        return 0
    if arguments.profile:
        return run_command(lambda: profiled(*arguments.profile))
    return run_command(one_of_each)


if __name__ == "__main__":
    sys.exit(main())
