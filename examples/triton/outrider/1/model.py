"""Outrider as a model for Triton's Python backend; ../config.pbtxt defines inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from threading import Thread
from typing import Any

import numpy as np
import outrider
import triton_python_backend_utils as pb_utils

CODES = {
    "option": pb_utils.TritonError.INVALID_ARG,
    "prompt": pb_utils.TritonError.INVALID_ARG,
    "busy": pb_utils.TritonError.UNAVAILABLE,
}


class TritonPythonModel:
    """Runs one thread per request. Requests wait in order until the engine has a free slot; if as
    many are waiting as config.pbtxt allows, the engine refuses the next one."""

    def initialize(self, args: dict[str, str]) -> None:
        given = json.loads(args["model_config"])["parameters"]
        bundle, slots, queue = (given[n]["string_value"] for n in ("bundle", "slots", "queue"))
        device = f"cuda:{args['model_instance_device_id']}"
        self.engine = outrider.load(
            bundle,
            slots=int(slots),
            queue=int(queue),
            device=device if args["model_instance_kind"] == "GPU" else "cpu",
        )
        self.running: set[Thread] = set()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            thread = Thread(target=self.answer, args=(request, request.get_response_sender()))
            self.running = {thread, *(other for other in self.running if other.is_alive())}
            thread.start()

    def finalize(self) -> None:
        """Close the engine; running requests end with an error."""
        self.engine.close()
        for thread in self.running:
            thread.join()

    def answer(self, request: Any, sender: Any) -> None:
        """Answer a request. The final flag is always sent, even after an error."""
        try:
            self.respond(request, sender)
        except outrider.OutriderError as error:
            code = CODES.get(error.kind, pb_utils.TritonError.INTERNAL)
            self.fail(sender, pb_utils.TritonError(str(error), code))
        except Exception as error:  # noqa: BLE001 - nothing else would report a thread's error
            self.fail(sender, pb_utils.TritonError(repr(error)))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def respond(self, request: Any, sender: Any) -> None:
        streamed = _input(request, "stream", False)
        with self.stream(request) as events:
            for event in events:
                if sender.is_cancelled():
                    cancelled = pb_utils.TritonError.CANCELLED
                    self.fail(
                        sender, pb_utils.TritonError("the client cancelled the request", cancelled)
                    )
                    return
                part = event if streamed else event.result
                if part is not None:
                    finish = "" if event.result is None else event.result.finish_reason
                    tensors = _text("text_output", part.text), _text("finish_reason", finish)
                    sender.send(pb_utils.InferenceResponse(output_tensors=list(tensors)))

    def stream(self, request: Any) -> outrider.Stream:
        try:
            prompt = _input(request, "text_input", b"").decode()
            given = json.loads(_input(request, "sampling_parameters", b"{}"))
            return self.engine.stream(prompt, outrider.Options().updated(given))
        except (TypeError, ValueError) as error:  # not a JSON object
            raise outrider.OutriderError("option", str(error), "See outrider.Options") from None

    def fail(self, sender: Any, error: Any) -> None:
        sender.send(pb_utils.InferenceResponse(error=error))


def _input(request: Any, name: str, usual: Any) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return usual if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _text(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))
