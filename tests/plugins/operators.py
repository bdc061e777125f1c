"""Runs an operator of plugins/onnxruntime as a single node in its own session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from samplers import cpu_library, instructions

from runtime.files.library import add_operators

FLOAT, INT8, INT64 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT64
Feeds = dict[str, npt.NDArray[Any]]
OTHER_SIZE = "the sizes of the inputs do not match"
LOOPS = ("avx512", "avx2", "plain")  # the instruction sets that most operators have loops for


def session_of(
    kind: str,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    tables: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    order: Sequence[str] | None = None,
    threads: int = 1,
    **attributes: float,
) -> ort.InferenceSession:
    """inputs, outputs: types by name. tables: constant inputs. order: of all inputs, with "" for an
    omitted one."""
    cpu_library()
    tables = tables or {}
    order = order or [*inputs, *tables]
    node = helper.make_node(kind, order, [*outputs], domain="outrider", **attributes)
    ends = (
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in side.items()]
        for side in (inputs, outputs)
    )
    constants = [numpy_helper.from_array(table, name) for name, table in tables.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("outrider", 1)]
    graph = helper.make_graph([node], kind, *ends, constants)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # between calls
    options.log_severity_level = 4  # errors are expected
    add_operators(options)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def with_each_set(
    compute: Callable[[], npt.NDArray[Any]], sets: Sequence[str] = LOOPS
) -> list[npt.NDArray[Any]]:
    """The results of `compute` with each of these instruction sets that the processor has; the
    plain loops come last. Skips the test if there are no others."""
    results = []
    for name in sets:
        with instructions(name) as available:
            if available:
                results.append(compute())
    if len(results) == 1:
        pytest.skip("this processor has one instruction set")
    return results


def in_place(session: ort.InferenceSession, feeds: Feeds, *names: str) -> npt.NDArray[Any]:
    """Run with each of these inputs bound to the same memory as the output NAME_out; returns the
    output `out`."""
    binding = session.io_binding()
    for name, array in feeds.items():
        place = ("cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        binding.bind_input(name, *place)
        if name in names:
            binding.bind_output(f"{name}_out", *place)
    binding.bind_output("out", "cpu")
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[-1]


def refused(session: ort.InferenceSession, feeds: Feeds, message: str, **wrong: Any) -> None:
    """Check that the session refuses `feeds` with these inputs replaced."""
    with pytest.raises(Exception, match=message):
        session.run(None, feeds | {name: np.asarray(array) for name, array in wrong.items()})
