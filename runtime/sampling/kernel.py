"""liboutrider, the native sampling kernel: loading it, and the structures of its interface.

The library is part of the wheel; `make plugins` builds it into build/lib. If it is missing,
`unavailable_reason()` describes why, and `reference.NumpySampler` and the portable graph (in place
of `HOST_FILE`) do the same work several times slower. The interface is plugins/include/outrider.h;
`native` draws and verifies through it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..files.errors import OutriderError
from ..files.library import LIBRARY, find_library
from .rules import no_draft_logits_error
from .sampler import Array, Ids, SlotSampling
from .warp import broken_row_error

ABI_VERSION = 14
MAX_THREADS = 64

DTYPES = ("float32", "float16", "bfloat16")
RULES = {"token": 0, "block": 1, "sigmoid": 2, "coupled": 3}
_REMEDY = "Run make plugins in a checkout, or install a wheel that was built with a C++ compiler."
SLOT_FAILED, _NO_DRAFT_LOGITS = 5, 4

# The structures of outrider.h, field for field; align=True lays them out as C does.
SLOT = np.dtype(
    [
        ("seed", "u8"), ("top_p", "f8"), ("lenience", "f8"), ("sigmoid_alpha", "f8"),
        ("sigmoid_beta", "f8"), ("context", "u8"), ("suppress", "u8"), ("bias_ids", "u8"),
        ("biases", "u8"), ("context_length", "i4"), ("output_start", "i4"),
        ("suppress_length", "i4"), ("bias_length", "i4"), ("suppress_rows", "i4"),
        ("temperature", "f4"), ("min_p", "f4"), ("repetition_penalty", "f4"),
        ("frequency_penalty", "f4"), ("presence_penalty", "f4"), ("top_k", "i4"), ("rule", "i4"),
        ("gamma", "i4"), ("position", "u4"), ("index", "i4"), ("reserved", "i4"),
    ],
    align=True,
)  # fmt: skip
ROW = np.dtype(
    [
        ("total", "f8"), ("peak", "f4"), ("rate", "f4"), ("cut", "f4"), ("tie_from", "i4"),
        ("min_weight", "f4"), ("token", "i4"), ("weight", "f4"), ("status", "i4"),
    ],
    align=True,
)  # fmt: skip
VERDICT = np.dtype(
    [
        ("token", "i8"), ("accepted", "i4"), ("examined", "i4"), ("status", "i4"),
        ("model", "i4"), ("row", "i4"), ("reserved", "i4"),
    ],
    align=True,
)  # fmt: skip


class Logits(ctypes.Structure):
    """outrider_logits: the address of rows [slots, rows, V], with strides in bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("vocab_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


_INT, _POINTER, _SIZE = ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t
_TAIL = (_POINTER, _SIZE)  # workspace, workspace_size
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "outrider_abi_version": (_INT, ()),
    "outrider_status_text": (ctypes.c_char_p, (_INT,)),
    "outrider_workspace_size": (_SIZE, (_INT,) * 3),
    "outrider_draw": (_INT, (_POINTER,) * 2 + (_INT,) * 3 + (_POINTER,) * 4 + _TAIL + (_INT,)),
    "outrider_verify": (_INT, (_POINTER,) * 3 + (_INT,) * 2 + (_POINTER,) * 5 + _TAIL + (_INT,)),
    "outrider_warp": (_INT, (_POINTER,) * 4 + _TAIL),
    "outrider_philox4x32": (None, (ctypes.c_uint64, _POINTER, _POINTER)),
    "outrider_uniform": (ctypes.c_double, (ctypes.c_uint64,) + (ctypes.c_uint32,) * 3),
    "outrider_device_workspace_size": (_SIZE, (_POINTER,)),
    "outrider_device_plan_draw": (
        _INT,
        (_POINTER,) * 3 + (_INT,) + (_POINTER,) * 4 + _TAIL + (_POINTER,),
    ),
    "outrider_device_plan_verify": (_INT, (_POINTER,) * 9 + _TAIL + (_POINTER,)),
    "outrider_log_softmax": (None, (_POINTER, _INT, _POINTER)),
    "outrider_confidence": (ctypes.c_double, (_POINTER, _INT, ctypes.c_int64, ctypes.c_double)),
    "outrider_instruction_set": (ctypes.c_char_p, ()),
    "outrider_use": (_INT, (ctypes.c_char_p,)),
}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Find and load the library. Raises OutriderError("backend")."""
    if (path := find_library()) is None:
        raise OutriderError("backend", f"{LIBRARY} was not found", _REMEDY)
    return load_file(path)


def load_file(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        version = library.outrider_abi_version()
    except (OSError, AttributeError) as error:  # for another platform, or another library
        raise OutriderError("backend", f"{path.name} cannot be loaded ({error})", _REMEDY) from None
    if version != ABI_VERSION:
        raise OutriderError(
            "backend", f"{path.name} has interface version {version}, not {ABI_VERSION}", _REMEDY
        )
    return library


def unavailable_reason() -> str | None:
    """Why the kernel cannot be used and what to do, in one line; None if it can."""
    try:
        load()
    except OutriderError as error:
        return f"{error.cause}. {error.remedy}"
    return None


def available() -> bool:
    return unavailable_reason() is None


def verdict_error(library: ctypes.CDLL, verdict: Any, sampling: SlotSampling) -> OutriderError:
    """The error that describes a verdict (of `VERDICT`) with a nonzero status."""
    if verdict["status"] == _NO_DRAFT_LOGITS:
        return no_draft_logits_error()
    where = sampling.row_name(verdict["row"], ("target", "draft")[verdict["model"]])
    return broken_row_error(where, status_text(library, int(verdict["status"])))


def fill_slot(slots: Array, b: int, sampling: SlotSampling) -> object:
    """Write slot b into slots [B] of `SLOT`. The ids of `sampling` and the object returned must
    outlive the slots."""
    params, context, suppress = sampling.params, sampling.context, sampling.suppress
    bias = _bias(params.logit_bias) if params.logit_bias else None
    bias_ids, biases = bias or (None, None)
    slots[b] = (
        params.seed, params.top_p, params.lenience, params.sigmoid_alpha, params.sigmoid_beta,
        _address(context), _address(suppress), _address(bias_ids), _address(biases),
        _length(context), sampling.output_start, _length(suppress), _length(bias_ids),
        sampling.suppress_rows, params.temperature, params.min_p, params.repetition_penalty,
        params.frequency_penalty, params.presence_penalty, min(params.top_k, 2**31 - 1),
        RULES[params.verify], sampling.gamma, sampling.position, sampling.index, 0,
    )  # fmt: skip
    return bias


@lru_cache(maxsize=64)
def _bias(pairs: tuple[tuple[int, float], ...]) -> tuple[Array, Array]:
    """Ids and biases as the arrays that the library reads."""
    ids, biases = zip(*pairs, strict=True)
    return np.array(ids, np.int64), np.array(biases, np.float32)


def status_text(library: ctypes.CDLL, status: int) -> str:
    text: bytes = library.outrider_status_text(status)
    return text.decode()


def _address(ids: Array | None) -> int:
    return 0 if ids is None else int(ids.ctypes.data)


def _length(ids: Ids | None) -> int:
    if ids is None:
        return 0
    if ids.dtype != np.int64 or not ids.flags.c_contiguous:
        raise ValueError("ids must be contiguous int64")
    return len(ids)
