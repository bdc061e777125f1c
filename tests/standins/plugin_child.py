"""Drives the TensorRT plugin with a fake CUDA driver. Runs in a separate process, because that
driver has libcuda's soname."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

INPUTS = (
    "target_logits", "draft_logits", "drafts", "seed", "position", "gamma", "temperature",
    "lenience",
)  # fmt: skip
OUTPUTS = np.int32, np.int64, np.int32  # accepted, token, status
TYPES = {"float32": 0, "float16": 1, "uint16": 7}  # nvinfer1::DataType; uint16 holds bfloat16


class Case(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("slots", "rows", "draft_rows")),
        *((name, ctypes.c_int64) for name in ("target_width", "draft_width")),
        ("rule", ctypes.c_char_p),
        ("inputs", ctypes.c_void_p * 8),
        ("outputs", ctypes.c_void_p * 3),
    )


def drive(
    driver_path: Path, kernels: Path, harness_path: Path, plugin: Path,
    cases: Sequence[Mapping[str, Any]],
) -> list[tuple[list[tuple[int, int, int]], list[str]]]:  # fmt: skip
    """Run cases, each {input or option: value}. Returns the outputs of each, by slot, and what the
    plugin and the driver reported."""
    driver = ctypes.CDLL(str(driver_path))  # its soname is the one that the plugin loads
    assert driver.fake_kernels(bytes(kernels))
    harness = ctypes.CDLL(str(harness_path))
    driver.fake_told.restype = harness.drive.restype = ctypes.c_char_p
    found = []
    for given in cases:
        arrays = [np.ascontiguousarray(given[name]) for name in INPUTS]
        (slots, rows, width), (_, draft_rows, draft_width) = arrays[0].shape, arrays[1].shape
        outputs = [np.full(slots, 99, dtype) for dtype in OUTPUTS]
        case = Case(
            TYPES[arrays[0].dtype.name],
            given.get("vocab_size", 0),
            slots,
            rows,
            draft_rows,
            width,
            draft_width,
            given.get("rule", "token").encode(),
            (ctypes.c_void_p * 8)(*(array.ctypes.data for array in arrays)),
            (ctypes.c_void_p * 3)(*(array.ctypes.data for array in outputs)),
        )
        driver.fake_told()
        text = harness.drive(bytes(plugin), ctypes.byref(case)) + driver.fake_told()
        answers = zip(*(array.tolist() for array in outputs), strict=True)
        found.append((list(answers), text.decode().splitlines()))
    return found
