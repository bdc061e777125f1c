"""Drives the TensorRT plugin with a fake CUDA driver, in a separate process because that driver has
libcuda's soname. Arguments: the driver, the emulated kernels, the harness, the plugin, and a folder
of cases.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np

INPUTS = (
    "target_logits", "draft_logits", "drafts", "seed", "position", "gamma", "temperature",
    "lenience",
)  # fmt: skip
OUTPUTS = {"accepted": np.int32, "token": np.int64, "status": np.int32}
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


def main() -> None:
    driver_path, kernels, harness_path, plugin, folder = sys.argv[1:]
    driver = ctypes.CDLL(driver_path)  # its soname is the one that the plugin loads
    assert driver.fake_kernels(kernels.encode())
    harness = ctypes.CDLL(harness_path)
    driver.fake_told.restype = harness.drive.restype = ctypes.c_char_p
    for path in sorted(Path(folder).glob("*.npz")):
        given = dict(np.load(path))
        options = {name: given.pop(name).item() for name in ("vocab_size", "rule")}
        arrays = [np.ascontiguousarray(given[name]) for name in INPUTS]
        (slots, rows, width), (_, draft_rows, draft_width) = arrays[0].shape, arrays[1].shape
        outputs = {name: np.full(slots, 99, dtype) for name, dtype in OUTPUTS.items()}
        case = Case(
            TYPES[arrays[0].dtype.name],
            options["vocab_size"],
            slots,
            rows,
            draft_rows,
            width,
            draft_width,
            options["rule"].encode() or None,
            (ctypes.c_void_p * 8)(*(array.ctypes.data for array in arrays)),
            (ctypes.c_void_p * 3)(*(array.ctypes.data for array in outputs.values())),
        )
        driver.fake_told()
        text = harness.drive(plugin.encode(), ctypes.byref(case)).decode()
        np.savez(path.with_suffix(".out"), **outputs)
        path.with_suffix(".txt").write_text(text + driver.fake_told().decode())


if __name__ == "__main__":
    main()
