"""The process of a system, as those see it who ask it."""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..core.clock import Sample
from . import SYSTEMS
from .protocol import Prompt, Request, Setup, Steps, Text, Unavailable
from .worker import serve

PATIENCE = 10.0  # seconds for a worker to end by itself


class Peer(AbstractContextManager["Peer"]):
    """The worker of one system on one checkpoint, or a pair. options: those of `Setup`.

    facts: the library's versions, dtype of the weights; load_seconds and load_lost, from the
    converted files; of ours `parameters`; bytes of weights, draft_weights (of an encoder-decoder
    those that a step reads), a cache_element,
    `before`, of the process without a model, and `loaded`, its peak with it.

    Raises:
        Unavailable: its packages are missing, or it does not take the checkpoint.
    """

    def __init__(self, name: str, target: Path, **options: Any):
        if (reason := SYSTEMS[name].missing()) is not None:
            raise Unavailable(reason)
        setup = Setup(target, **options)
        self._prompts: dict[str, Prompt] = {}  # the last of each mode
        context = multiprocessing.get_context("spawn")  # nothing of this process is in it
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, setup), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.facts: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():  # amid a text, or a conversion
            self._process.terminate()
            self._process.join()

    def generate(self, request: Request) -> list[Text]:
        """Decode the texts; all their times are from the request on.

        Raises:
            Unavailable: it failed.
            ValueError: the prompt is the one before in this mode: a cache of prefixes, which a
                worker should not have, would show.
        """
        if len(request.prompts) == 1:
            (prompt,), last = request.prompts, self._prompts.get(request.mode)
            if last is not None and np.array_equal(prompt, last):
                raise ValueError("the same prompt twice in a row")
            self._prompts[request.mode] = prompt[:]
        texts: list[Text] = self._ask(request)
        for text in texts:
            if len(text.tokens) != request.new_tokens:
                raise Unavailable(f"it gave {len(text.tokens)} of {request.new_tokens} tokens")
        return texts

    def steps(self, request: Steps) -> dict[str, list[Sample]]:
        """Of Outrider alone: samples by "draft" and width. Raises Unavailable."""
        samples: dict[str, list[Sample]] = self._ask(request)
        return samples

    def _ask(self, request: Request | Steps) -> Any:
        with suppress(BrokenPipeError):  # there will be no answer, which says why
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
