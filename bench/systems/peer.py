"""The client side of a system's worker process."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..core.clock import Sample
from . import SYSTEMS
from .protocol import Prompt, Request, Setup, StepsRequest, Text, Unavailable
from .worker import serve

EXIT_TIMEOUT = 10.0  # seconds to wait for a worker to exit


class Peer(AbstractContextManager["Peer"]):
    """The worker of one system, on one checkpoint or a pair. options: fields of `Setup`.

    facts: versions of the libraries; dtype of the weights; load_seconds and load_lost, for loading
    the converted files; for Outrider `parameters`; and in bytes: weights and draft_weights (for an
    encoder-decoder those that a step reads), cache_element, `before` (memory of the process without
    a model), and `loaded` (its peak with the model).

    Raises:
        Unavailable: packages are missing, or the system cannot load the checkpoint.
    """

    def __init__(self, name: str, target: Path, **options: Any):
        if (reason := SYSTEMS[name].missing_reason()) is not None:
            raise Unavailable(reason)
        setup = Setup(target, **options)
        self._prompts: dict[str, Prompt] = {}  # the last prompt of each mode
        context = multiprocessing.get_context("spawn")  # shares nothing with this process
        self._pipe, worker_pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(worker_pipe, name, setup), daemon=True)
        self._process.start()
        worker_pipe.close()
        try:
            self.facts: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(EXIT_TIMEOUT)
        if self._process.is_alive():  # in the middle of a text or a conversion
            self._process.terminate()
            self._process.join()

    def generate(self, request: Request) -> list[Text]:
        """Decode the texts. All times are measured from the request.

        Raises:
            Unavailable: the system failed.
            ValueError: the prompt is the same as the last one in this mode. A system that caches
                prefixes would have an advantage.
        """
        if len(request.prompts) == 1:
            (prompt,), last = request.prompts, self._prompts.get(request.mode)
            if last is not None and np.array_equal(prompt, last):
                raise ValueError("the same prompt twice in a row")
            self._prompts[request.mode] = prompt[:]
        texts: list[Text] = self._ask(request)
        for text in texts:
            if len(text.tokens) != request.new_tokens:
                raise Unavailable(f"it returned {len(text.tokens)} of {request.new_tokens} tokens")
        return texts

    def time_steps(self, request: StepsRequest) -> dict[str, list[Sample]]:
        """Time calls of the engines (Outrider only); returns samples by "draft" and width. Raises
        Unavailable."""
        samples: dict[str, list[Sample]] = self._ask(request)
        return samples

    def _ask(self, request: Request | StepsRequest) -> Any:
        with suppress(BrokenPipeError):  # `_answer` then raises with the reason
            self._pipe.send(request)
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            status = self._process.exitcode or 0
            why = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise Unavailable(f"its worker ended with {why}") from None
        if isinstance(answer, Unavailable):
            raise answer
        return answer
