"""The native sampling kernel, liboutrider: draws and verifies rounds in place of NumPy.

The library comes with the wheel, or from `make plugins` into build/lib. Where it is missing,
`unavailable()` says why and `sampler.NumpySampler` does the same work, several times slower. The
interface is plugins/include/outrider.h; semantics are those of warp.py and rules.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError
from ..files.manifest import MOST_GAMMA
from .rules import Verdict
from .sampler import Array, Ids, SlotSampling

ABI_VERSION = 3
MAX_THREADS = 64
FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2] / "build" / "lib")

RULES = {"token": 0, "block": 1, "sigmoid": 2}
_DTYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}
_REMEDY = "Run make plugins in a checkout, or install a wheel that was built with a C++ compiler."
_SLOT_FAILED, _NO_DRAFT_LOGITS = 5, 4

# The structures of outrider.h, field for field; align=True lays them out as C does.
SLOT = np.dtype(
    [
        ("seed", "u8"), ("top_p", "f8"), ("lenience", "f8"), ("sigmoid_alpha", "f8"),
        ("sigmoid_beta", "f8"), ("context", "u8"), ("suppress", "u8"), ("context_length", "i4"),
        ("suppress_length", "i4"), ("suppress_rows", "i4"), ("temperature", "f4"),
        ("min_p", "f4"), ("repetition_penalty", "f4"), ("top_k", "i4"), ("rule", "i4"),
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
    """outrider_logits: where rows [slots, rows, V] are; strides in bytes."""

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
    "outrider_draw": (_INT, (_POINTER,) * 2 + (_INT,) * 3 + (_POINTER,) * 5 + _TAIL + (_INT,)),
    "outrider_verify": (
        _INT,
        (_POINTER, _POINTER, _INT, _POINTER, _INT, _INT) + (_POINTER,) * 5 + _TAIL + (_INT,),
    ),
    "outrider_warp": (_INT, (_POINTER,) * 4 + _TAIL),
    "outrider_philox4x32": (None, (ctypes.c_uint64, _POINTER, _POINTER)),
    "outrider_uniform": (ctypes.c_double, (ctypes.c_uint64,) + (ctypes.c_uint32,) * 3),
    "outrider_device_workspace_size": (_SIZE, (_POINTER,)),
    "outrider_device_plan_draw": (
        _INT,
        (_POINTER,) * 3 + (_INT,) + (_POINTER,) * 6 + _TAIL + (_POINTER,),
    ),
    "outrider_device_plan_verify": (
        _INT,
        (_POINTER,) * 3 + (_INT,) + (_POINTER,) * 6 + _TAIL + (_POINTER,),
    ),
    "outrider_instruction_set": (ctypes.c_char_p, ()),
    "outrider_use": (_INT, (ctypes.c_char_p,)),
}


def load(path: Path | None = None) -> ctypes.CDLL:
    """The library at `path`, or the one that `FOLDERS` hold. Raises OutriderError("backend")."""
    return _open(path) if path is not None else _default()


@lru_cache(maxsize=1)
def _default() -> ctypes.CDLL:
    for folder in FOLDERS:
        if (folder / "liboutrider.so").is_file():
            return _open(folder / "liboutrider.so")
    raise OutriderError("backend", "liboutrider.so is not there", _REMEDY)


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        version = library.outrider_abi_version()
    except (OSError, AttributeError) as error:  # another platform's, or not this library
        raise OutriderError("backend", f"{path.name} cannot be loaded ({error})", _REMEDY) from None
    if version != ABI_VERSION:
        raise OutriderError(
            "backend",
            f"{path.name} has interface version {version}, not {ABI_VERSION}",
            _REMEDY,
        )
    return library


def unavailable() -> str | None:
    """Why there is no kernel and what to do, in one line; None where there is one."""
    try:
        load()
    except OutriderError as error:
        return f"{error.cause}. {error.remedy}"
    return None


def available() -> bool:
    return unavailable() is None


class RoundSampler:
    """See `sampler.Sampler`.

    vocab_size: the width that target and draft share; columns beyond it are not read. slots: the
    most that take part in a round. width: the most draft tokens. threads: at most; used where they
    pay. All memory is allocated here, once; one sampler is for one thread at a time.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        slots: int = 1,
        threads: int = 1,
        draft_vocab_size: int | None = None,
        library: ctypes.CDLL | None = None,
    ):
        self.vocab_size, self.width, self.threads = vocab_size, width, threads
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self._library = library or load()
        size = self._library.outrider_workspace_size(
            max(vocab_size, self.draft_vocab_size), width, threads
        )
        if size == 0:
            raise ValueError(f"no workspace for V={vocab_size}, width={width}, threads={threads}")
        self._workspace = np.empty(size, np.uint8)
        self._slots = np.zeros(slots, SLOT)
        self._verdicts = np.zeros(slots, VERDICT)
        self._ratios = np.zeros((slots, width))
        self._kept: Array = np.empty((0,), np.float32)  # [slots, width, V], once a draft drew
        self._drew, self._draft_slot = False, 0  # the first slot of what `draw` was given
        self._places: list[SlotSampling] = []
        self.drafts = np.zeros((slots, width), np.int64)
        self.rows = np.zeros((slots, width), ROW)
        # `array.ctypes` costs a microsecond each time.
        self._at_slots, self._at_drafts, self._at_rows, self._at_verdicts, self._at_ratios = (
            array.ctypes.data
            for array in (self._slots, self.drafts, self.rows, self._verdicts, self._ratios)
        )
        self._memory = self._workspace.ctypes.data, size

    def begin(self, places: Sequence[SlotSampling]) -> None:
        self._places, self._drew, self._draft_slot = list(places), False, 0
        for b, place in enumerate(places):
            fill_slot(self._slots, b, place)

    def draw(
        self,
        logits: Array,
        step: int,
        uniforms: Array | None = None,
        keep: bool = True,
        first_slot: int = 0,
    ) -> Ids:
        """See `Sampler.draw`. uniforms: float64 [B, width] in place of Philox."""
        count = len(self._places)
        kept = self._keep(logits.dtype) if keep else None
        self._drew, self._draft_slot = True, first_slot
        rows = _logits(logits[:, None], self.draft_vocab_size, first_slot)
        status = self._library.outrider_draw(
            ctypes.addressof(rows), self._at_slots, count, self.width, step,
            _pointer(uniforms, (count, self.width)), self._at_drafts, self._at_rows, kept,
            self._at_verdicts, *self._memory, self.threads,
        )  # fmt: skip
        self._check(status)
        return self.drafts[:count, step]

    def stop(self, b: int, gamma: int) -> None:
        """See `Sampler.stop`."""
        self._places[b] = replace(self._places[b], gamma=gamma)
        self._slots["gamma"][b] = gamma

    def give(self, drafts: Sequence[Sequence[int]], first_slot: int = 0) -> None:
        """See `Sampler.give`."""
        self._drew, self._draft_slot = False, first_slot
        for b, tokens in enumerate(drafts):
            self.drafts[b, : len(tokens)] = tokens

    def verify(
        self,
        logits: Array,
        draft_logits: Array | Sequence[Array] | None = None,
        uniforms: Array | None = None,
        first_slot: int = 0,
    ) -> list[Verdict]:
        """See `Sampler.verify`. uniforms: float64 [B, width + 1] in place of Philox.

        draft_logits: also as one array [S, >= gamma, V]. Where they are not given and `draw` was
        not called, the draft has no distribution (n-gram lookup): see `give`.
        Raises OutriderError("option") where the sigmoid rule meets such a draft.
        """
        count = len(self._places)
        if logits.shape[1] <= max((place.gamma for place in self._places), default=-1):
            raise ValueError(f"{logits.shape[1]} rows of logits are too few")
        target = _logits(logits, self.vocab_size, first_slot)
        draft = Logits(None, 0, 0, 1, 0)
        if draft_logits is not None and len(draft_logits):
            steps = draft_logits if isinstance(draft_logits, np.ndarray) else _steps(draft_logits)
            draft = _logits(steps, self.draft_vocab_size, self._draft_slot)
        elif self._drew:
            draft = _logits(self._kept, self.draft_vocab_size)
        status = self._library.outrider_verify(
            ctypes.addressof(target), ctypes.addressof(draft), int(draft_logits is not None),
            self._at_slots, count, self.width, _pointer(uniforms, (count, self.width + 1)),
            self._at_drafts, self._at_rows if self._drew else None, self._at_verdicts,
            self._at_ratios, *self._memory, self.threads,
        )  # fmt: skip
        self._check(status)
        return [
            Verdict(accepted, token, tuple(ratios[:examined]))
            for (token, accepted, examined, *_), ratios in zip(
                self._verdicts[:count].tolist(), self._ratios[:count].tolist(), strict=True
            )
        ]

    def _keep(self, dtype: np.dtype[Any]) -> int:
        shape = (*self.drafts.shape, self.draft_vocab_size)
        if self._kept.shape != shape or self._kept.dtype != dtype:
            self._kept = np.empty(shape, dtype)
        address: int = self._kept.ctypes.data
        return address

    def _check(self, status: int) -> None:
        if status == 0:
            return
        if status != _SLOT_FAILED:
            raise ValueError(status_text(self._library, status))
        b = next(b for b in range(len(self._places)) if self._verdicts[b]["status"])
        failed, place = self._verdicts[b], self._places[b]
        raise failure(self._library, failed, place)


def failure(library: ctypes.CDLL, verdict: Any, place: SlotSampling) -> OutriderError:
    """What a verdict (of `VERDICT`) with a status says, for people."""
    text = status_text(library, int(verdict["status"]))
    if verdict["status"] == _NO_DRAFT_LOGITS:
        return OutriderError(
            "option",
            "verify=sigmoid needs the draft's logits, and this draft has none",
            "Use verify=token, or a draft model.",
        )
    model = ("target", "draft")[verdict["model"]]
    return OutriderError(
        "numeric",
        f"{model}, {place.name}, position {place.position + verdict['row']}: {text}",
        "Build the engines with DTYPE=float32, and check that the checkpoint is intact.",
    )


def fill_slot(slots: Array, b: int, place: SlotSampling) -> None:
    """Write a place into slots [B] of `SLOT`; its ids must outlive them."""
    params, context, suppress = place.params, place.context, place.suppress
    slots[b] = (
        params.seed, params.top_p, params.lenience, params.sigmoid_alpha, params.sigmoid_beta,
        _address(context), _address(suppress), _length(context), _length(suppress),
        place.suppress_rows, params.temperature, params.min_p, params.repetition_penalty,
        min(params.top_k, 2**31 - 1), RULES[params.verify], place.gamma, place.position,
        place.index, 0,
    )  # fmt: skip


def status_text(library: ctypes.CDLL, status: int) -> str:
    text: bytes = library.outrider_status_text(status)
    return text.decode()


def warp_weights(
    logits: Array,
    place: SlotSampling,
    vocab_size: int | None = None,
    library: ctypes.CDLL | None = None,
) -> tuple[npt.NDArray[np.float32], float]:
    """The warped weights [V] of one row and their total: for tests and tools, not for the loop."""
    width = vocab_size or logits.shape[-1]
    sampler = RoundSampler(width, MOST_GAMMA, library=library)
    sampler.begin([place])
    rows, total = _logits(logits[None, None], width), ctypes.c_double()
    weights = np.empty(width, np.float32)
    status = sampler._library.outrider_warp(
        ctypes.addressof(rows), sampler._at_slots, weights.ctypes.data,
        ctypes.addressof(total), *sampler._memory,
    )  # fmt: skip
    if status:
        raise ValueError(status_text(sampler._library, status))
    return weights, total.value


def _logits(array: Array, vocab_size: int, first_slot: int = 0) -> Logits:
    """[slots, rows, V], V contiguous; its slots are those from `first_slot` on.

    bfloat16 may come as uint16.
    """
    strides, dtype = array.strides, array.dtype
    if array.ndim != 3 or array.shape[-1] < vocab_size:
        raise ValueError(f"logits {array.shape} are narrower than V={vocab_size}")
    if strides[-1] != dtype.itemsize:
        raise ValueError("the logits of a row must be contiguous")
    code = _DTYPES.get(dtype)
    if code is None:
        if dtype.name != "bfloat16":
            raise ValueError(f"logits of type {dtype.name}, not float32, float16 or bfloat16")
        code = 2
    address = array.__array_interface__["data"][0] - first_slot * strides[0]
    return Logits(address, strides[0], strides[1], vocab_size, code)


def _steps(rows: Sequence[Array]) -> Array:
    """[S, V] of each step as one view [S, steps, V]: an engine's buffers are evenly spaced."""
    first = rows[0]
    addresses = [row.__array_interface__["data"][0] for row in rows]
    spacing = addresses[1] - addresses[0] if len(rows) > 1 else 0
    if any(row.strides != first.strides for row in rows) or any(
        address != addresses[0] + i * spacing for i, address in enumerate(addresses)
    ):
        raise ValueError("the draft's logits of a round are not evenly spaced in memory")
    shape = (first.shape[0], len(rows), first.shape[1])
    strides = (first.strides[0], spacing, first.strides[1])
    return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)


def _address(ids: Ids | None) -> int:
    return 0 if ids is None else int(ids.ctypes.data)


def _length(ids: Ids | None) -> int:
    if ids is None:
        return 0
    if ids.dtype != np.int64 or not ids.flags.c_contiguous:
        raise ValueError("ids must be contiguous int64")
    return len(ids)


def _pointer(uniforms: Array | None, shape: tuple[int, ...]) -> int | None:
    if uniforms is None:
        return None
    if uniforms.dtype != np.float64 or not uniforms.flags.c_contiguous or uniforms.shape != shape:
        raise ValueError(f"uniforms must be contiguous float64 {shape}")
    return int(uniforms.ctypes.data)
