"""GPU rounds without a GPU: engines that enqueue on the stream of `cuda_standin.FakeDriver`."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from cuda_standin import FakeDriver, make_device
from fakes import FakeEngine, IdleFake, Model, graph_facts

from runtime.backends.cuda import Cuda
from runtime.backends.device import DeviceCall, DeviceEngine
from runtime.backends.engine import Ids
from runtime.files.graphs import Dtype, GraphFacts
from runtime.gpu.rounds import DeviceRounds


def facts_of(fake: FakeEngine, dtype: Dtype = "float32") -> GraphFacts:
    return graph_facts("fake", fake.vocab_size, fake.capacity, fake.capacity, dtype)


class FakeDeviceEngine(DeviceEngine):
    """A `FakeEngine` behind `enqueue`, which reads its inputs from device memory when it runs.
    dtype: of its logits, float32 or bfloat16."""

    def __init__(
        self, cuda: Cuda, driver: FakeDriver, stream: int, fake: FakeEngine,
        dtype: Dtype = "float32",
    ):  # fmt: skip
        facts = facts_of(fake, dtype)
        super().__init__(cuda, stream, Path(), facts, slots=fake.slots, max_outputs=9)
        self.chunk = fake.chunk
        fake.__class__ = type("Behind", (IdleFake, type(fake)), {})
        self._driver, self.fake = driver, fake
        self.made: set[object] = set()  # the calls that ran outside a capture

    @staticmethod
    def logits_dtype(facts: GraphFacts) -> Dtype:
        return facts.dtype

    def _open(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fake, name)  # cache, calls

    @property
    def model(self) -> Model:
        return self.fake.model

    @model.setter
    def model(self, model: Model) -> None:
        self.fake.model = model

    def enqueue(self, call: DeviceCall, graph: object = None) -> None:
        shape = (graph, call.batch, call.tokens, call.outputs)
        if self._driver._recording is None:
            self.made.add(shape)
        assert shape in self.made, f"{shape} is captured before it ran"
        me = weakref.ref(self)  # a graph that kept its engine alive would prevent cleanup

        def work() -> None:
            if (engine := me()) is not None:
                engine._run(call)

        self._driver.enqueue(self.stream, work)

    def _run(self, call: DeviceCall) -> None:
        def ids(address: int, *shape: int) -> Ids:
            kind = ctypes.c_int64 * int(np.prod(shape))
            return np.ctypeslib.as_array(kind.from_address(address)).reshape(shape)

        logits = self.fake.forward(
            ids(call.input_ids, call.batch, call.tokens).copy(),
            ids(call.position, call.batch).copy(),
            ids(call.logits_index, call.outputs).copy(),
            call.first_slot,
        )
        if self.logit_type == "bfloat16":
            logits = (logits.view(np.uint32) >> 16).astype(np.uint16)
        ctypes.memmove(call.logits, logits.ctypes.data, logits.nbytes)


def make_rounds(
    target: FakeEngine,
    draft: FakeEngine | None,
    *,
    driver: FakeDriver | None = None,
    dtype: Dtype = "float32",
    **options: Any,
) -> DeviceRounds:
    """Rounds on fake engines. dtype: of the logits; options: those of `DeviceRounds`."""
    driver = driver or FakeDriver()
    device = make_device(driver)
    stream = device.create_stream()
    engines = [
        None if fake is None else FakeDeviceEngine(device, driver, stream, fake, dtype)
        for fake in (target, draft)
    ]
    return DeviceRounds(device, stream, engines[0], engines[1], **options)
