"""The part of Triton's module for Python models that examples/triton uses.

Names, arguments, defaults and error codes are those of triton-inference-server/python_backend,
src/pb_stub.cc and src/resources/triton_python_backend_utils.py (2026-07). Like the server, it
refuses text that is not bytes in an object array, and a response after the final one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class _Code(IntEnum):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = 1, 3, 4, 7


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = _Code

    def __init__(self, message: str, code: _Code = _Code.INTERNAL):
        assert isinstance(message, str) and isinstance(code, _Code)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> _Code:
        return self._code


class Tensor:
    def __init__(self, name: str, values: np.ndarray[Any, Any]):
        texts = values.dtype == np.object_
        assert all(isinstance(value, bytes) for value in values.flat) if texts else True
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._values


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None):
        assert isinstance(output_tensors, list | tuple)
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def error(self) -> TritonError | None:
        return self._error


class InferenceRequest:
    """cancelled: set by the client. sent: the responses, and None after the final flag. on_send:
    called with each response."""

    def __init__(
        self, inputs: Sequence[Tensor], on_send: Callable[[InferenceResponse], None] | None = None
    ):
        self._inputs, self.on_send = list(inputs), on_send
        self.cancelled, self.over = Event(), False
        self.sent: SimpleQueue[InferenceResponse | None] = SimpleQueue()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    def get_response_sender(self) -> InferenceResponseSender:
        return InferenceResponseSender(self)


class InferenceResponseSender:
    def __init__(self, request: InferenceRequest):
        self._request = request

    def is_cancelled(self) -> bool:
        return self._request.is_cancelled()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self._request.over, "a response after the final one"
        assert flags in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        assert response is not None or flags, "nothing is sent"
        if response is not None:
            self._request.sent.put(response)
            if self._request.on_send:
                self._request.on_send(response)
        if flags:
            self._request.over = True
            self._request.sent.put(None)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)
