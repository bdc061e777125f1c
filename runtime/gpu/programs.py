"""The launches of a round on a GPU: calls of engines and kernels in order, and their graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.cuda import CaptureError, Graph
from ..backends.device import DeviceCall, DeviceEngine
from ..sampling import kernel
from ..sequence import ActiveSequence, Rounds
from . import launch
from .launch import SEQUENCE, Bookkeeping, Device, KernelBuffers, KernelSizes, Plan
from .memory import Buffers, Sizes, results_dtype, step_stride

logger = logging.getLogger("outrider")
Action = Callable[[], None]  # puts something on the stream


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape that a graph is made for: number of draft steps, slots 0 .. batch - 1, and flags of
    the sampling features that these may use."""

    gamma: int
    batch: int
    flags: int

    @property
    def results_dtype(self) -> np.dtype[Any]:
        return results_dtype(self.batch, self.gamma)

    def read(self, memory: npt.NDArray[np.uint8]) -> Any:
        """The results of a round, as a view of host memory."""
        return memory[: self.results_dtype.itemsize].view(self.results_dtype)[0]


class Programs(Rounds):
    """Rounds as lists of actions, and as CUDA graphs, by shape.

    graphs: capture them; otherwise, and with a warning if a capture fails, the calls are launched
    one by one.
    """

    def __init__(
        self,
        device: Device,
        stream: int,
        target: DeviceEngine,
        draft: DeviceEngine | None,
        *,
        vocab_size: int,
        max_len: int,
        max_gamma: int,
        graphs: bool = True,
    ):
        self.target: DeviceEngine = target
        self.draft: DeviceEngine | None = draft
        self._device, self._stream = device, stream
        self._vocab_size, self._use_graphs = vocab_size, graphs
        self._draft_width = min(vocab_size, draft.vocab_size) if draft else 0
        self._sizes = Sizes(
            target.slots, max_gamma if draft else 0, max_len, target.capacity, target.row_bytes,
            draft.row_bytes if draft else 0,
        )  # fmt: skip
        self._buffers = Buffers(device, self._sizes, stream)
        self._programs: dict[Shape, list[Action]] = {}
        self._graphs: dict[Shape, Graph | None] = {}
        self._uploaded_gammas = b""  # a copy of the device's

    def graph_nodes(self) -> dict[Shape, int]:
        """Kernels and copies in the graph of each shape."""
        return {shape: graph.nodes for shape, graph in self._graphs.items() if graph is not None}

    def _upload_gammas(self, gammas: dict[ActiveSequence, int], batch: int) -> None:
        array = np.full(batch, -1, np.int32)
        for sequence, gamma in gammas.items():
            array[sequence.slot.index] = gamma
        if array.tobytes() != self._uploaded_gammas:  # mostly the same from round to round
            self._uploaded_gammas = array.tobytes()
            self._device.upload(self._buffers.gammas, array, self._stream)

    def _round_action(self, shape: Shape) -> Action:
        """The action that puts a round of this shape on the stream: as a graph or call by call."""
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = self._round_program(shape)
        if self._use_graphs and shape not in self._graphs:
            self._graphs[shape] = self._capture(shape, program)
        graph = self._graphs.get(shape)
        if graph is not None:
            return lambda: self._device.replay(graph, self._stream)
        return lambda: enqueue_all(program)

    def _capture(self, shape: Shape, program: list[Action]) -> Graph | None:
        """Capture a program as a graph; None, with a one-line warning, if that fails."""
        # First run it without any sequences: engines prepare what cannot be done in a capture.
        self._upload_gammas({}, shape.batch)
        enqueue_all(program)
        self._device.wait_for_stream(self._stream)
        try:
            with ExitStack() as stack:
                for engine in (self.target, self.draft):
                    if engine is not None:
                        stack.enter_context(engine.capturing())
                return self._device.capture(partial(enqueue_all, program), self._stream)
        except CaptureError as error:
            logger.warning(
                "rounds of gamma=%d run without a CUDA graph, slower: %s", shape.gamma, error
            )
            return None

    def _logits_view(
        self, engine: DeviceEngine, address: int, slot_stride: int, row_stride: int
    ) -> kernel.Logits:
        width = self._vocab_size if engine is self.target else self._draft_width
        kind = kernel.DTYPES.index(engine.logit_type)
        return kernel.Logits(address, slot_stride, row_stride, width, kind)

    def _result_address(self, shape: Shape, name: str) -> int:
        """The address of a field of `memory.results_dtype`."""
        fields: Any = shape.results_dtype.fields
        address: int = self._buffers.results + fields[name][1]
        return address

    def _bookkeeping(self, shape: Shape, first: int = 0) -> Bookkeeping:
        at = self._buffers
        calls = [
            f"{call}_{what}" for call in ("draft", "step", "target") for what in ("ids", "position")
        ]
        return Bookkeeping(
            **{name: getattr(at, name) for name in calls},
            **{name: self._result_address(shape, name) for name in ("drafts", "verdicts", "clock")},
            sequences=at.sequences + first * SEQUENCE.itemsize,
            slots=at.slots + first * kernel.SLOT.itemsize,
            turns=at.gammas + 4 * first,
            slot_count=shape.batch,
            width=shape.gamma,
            draft_vocab_size=self.draft.vocab_size if self.draft else 2**31 - 1,
        )

    def _launch_bookkeeping(self, name: str, data: Bookkeeping, step: int = 0) -> Action:
        own = Bookkeeping.from_buffer_copy(data)
        own.step = step
        return lambda: self._device.launch_bookkeeping(name, own, self._stream)

    def _launch_plan(self, plan: Plan) -> Action:
        return lambda: self._device.launch(plan, self._stream)

    def _kernel_arguments(self, shape: Shape, first: int) -> tuple[KernelSizes, KernelBuffers]:
        """The sizes and buffers that the plans of a shape share, with a new workspace."""
        width = self._draft_width if shape.gamma else 0
        sizes = KernelSizes(shape.batch, shape.gamma, self._vocab_size, width, shape.flags, 0)
        return sizes, KernelBuffers(
            **{
                name: self._result_address(shape, name) for name in ("drafts", "verdicts", "ratios")
            },
            slots=self._buffers.slots + first * kernel.SLOT.itemsize,
            rows=self._buffers.rows,
            workspace=self._device.allocate(launch.workspace_size(sizes)),
        )

    def _first_token_program(self, shape: Shape, slot: int, logits: kernel.Logits) -> list[Action]:
        """The actions after a prefill: draw from p alone, as a round without drafts does."""
        sizes, buffers = self._kernel_arguments(shape, slot)
        data = self._bookkeeping(shape, slot)
        return [
            self._launch_bookkeeping("outrider_begin", data),
            self._launch_plan(launch.plan_verify(sizes, logits, None, buffers)),
            self._launch_bookkeeping("outrider_commit", data),
        ]

    def _round_program(self, shape: Shape) -> list[Action]:
        """The actions of a round, in order. All addresses are fixed; what varies is in device
        memory."""
        at, batch, gamma = self._buffers, shape.batch, shape.gamma
        sizes, buffers = self._kernel_arguments(shape, 0)
        data = self._bookkeeping(shape)
        actions = [self._launch_bookkeeping("outrider_begin", data)]
        drafts = None
        if gamma:
            draft = self.draft
            assert draft is not None
            row, spacing = draft.row_bytes, step_stride(batch, draft.row_bytes)
            drafts = self._logits_view(draft, at.draft_logits, row, spacing)
            for step in range(gamma):
                logits = at.draft_logits + step * spacing
                # The first step feeds two tokens: after a fully accepted round the draft lacks a
                # row.
                call = (
                    DeviceCall(batch, 1, 1, at.step_ids, at.step_position, at.counting, logits)
                    if step
                    else DeviceCall(batch, 2, 1, at.draft_ids, at.draft_position, at.one, logits)
                )
                actions.append(lambda call=call: draft.enqueue(call, shape))  # type: ignore[misc]
                drawn = self._logits_view(draft, logits, row, row)
                actions.append(self._launch_plan(launch.plan_draw(sizes, drawn, buffers, step)))
                actions.append(self._launch_bookkeeping("outrider_feed", data, step))
        row = self.target.row_bytes
        verify = DeviceCall(
            batch, gamma + 1, gamma + 1, at.target_ids, at.target_position, at.counting,
            at.target_logits,
        )  # fmt: skip
        target = self._logits_view(self.target, at.target_logits, (gamma + 1) * row, row)
        verdicts = launch.plan_verify(sizes, target, drafts, buffers)
        return [
            *actions,
            lambda: self.target.enqueue(verify, shape),
            self._launch_plan(verdicts),
            self._launch_bookkeeping("outrider_commit", data),
        ]


def enqueue_all(program: list[Action]) -> None:
    for action in program:
        action()
