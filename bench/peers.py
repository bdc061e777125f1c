"""Other decoders on the same checkpoints, each in a process of its own: its threads and its memory
stay out of ours.

`Peer` drives a worker (bench/peer_worker.py) with one JSON line a request and reads one line an
answer. A peer, or a mode of it, that is not there raises `Unavailable`, whose text is the reason.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from .timing import Sample

PATIENCE = 10.0  # seconds for a worker to end by itself
MAX_LEN = 2048  # rows of a cache, where its size is fixed when the model is loaded


class Unavailable(Exception):
    """A peer, or what is asked of it, is not there; the text says why."""


@dataclass(frozen=True)
class Kind:
    """A peer. module: in this package. packages: what the module imports. extra: the group in
    pyproject.toml that brings them.

    modes, of one name in all peers: "plain" decoding; "draft", with the draft model, and "lookup",
    with n-grams of the text, of gamma tokens a round. precisions: of the weights.
    """

    module: str
    packages: tuple[str, ...]
    extra: str
    modes: tuple[str, ...]
    precisions: tuple[str, ...] = ("float32",)


PEERS = {
    "outrider": Kind(
        "peer_outrider",
        ("onnxruntime", "torch", "transformers"),
        "dev",
        # "auto" chooses gamma for each round.
        ("plain", "draft", "auto", "lookup"),
    ),
    "transformers": Kind(
        "peer_transformers",
        ("torch", "transformers"),
        "dev",
        # "eager" is plain with eager attention; "assistant" drafts as Transformers sets it up.
        ("plain", "eager", "draft", "assistant", "lookup"),
    ),
    "genai": Kind(
        "peer_genai",
        ("onnxruntime_genai", "onnx_ir", "torch", "transformers"),
        "genai",
        ("plain", "draft", "lookup"),
        ("float32", "int8", "int4"),
    ),
    "llama.cpp": Kind(
        "peer_llama",
        ("llama_cpp", "gguf", "torch", "safetensors"),
        "llama",
        ("plain", "draft", "lookup"),
        ("float32", "q8_0", "q4_0", "q4_k"),
    ),
}
ATTENTION = {"sdpa": "plain", "eager": "eager"}  # of Transformers, and their modes


def missing(name: str = "transformers") -> str | None:
    """Why there is no such peer, None if its packages are installed."""
    kind = PEERS[name]
    absent = [package for package in kind.packages if not importlib.util.find_spec(package)]
    return f"{' and '.join(absent)} not installed (group {kind.extra})" if absent else None


@dataclass(frozen=True)
class Setup:
    """What a worker is started with. target, draft: Hugging Face folders. threads: of every pool
    that decodes. work: where it keeps converted checkpoints. max_len: rows, prompt and gamma too.
    slots: texts that are decoded together, where a cache is made for so many.
    """

    target: str
    draft: str | None
    threads: int
    precision: str
    work: str
    max_len: int
    slots: int = 1


@dataclass(frozen=True)
class Request:
    """A text of exactly `new_tokens` tokens: its end is never recognised. gamma: tokens drafted a
    round. seed: of the draws at a temperature above 0, which are from the whole vocabulary."""

    prompt: list[int]
    new_tokens: int
    mode: str = "plain"
    temperature: float = 0.0
    seed: int = 0
    gamma: int = 4


@dataclass(frozen=True)
class Batch:
    """Texts that are decoded together, greedily. prompts: of the same length, so that nothing has
    to be padded. The others: as those of a `Request`."""

    prompts: list[list[int]]
    new_tokens: int
    mode: str = "plain"
    gamma: int = 4


@dataclass(frozen=True)
class StepCosts:
    """Seconds of calls of the engines alone: a draft step, and the target with 1, 2, ... tokens."""

    draft: float
    widths: list[float]


@dataclass(frozen=True)
class Text:
    """A peer's answer.

    times: seconds from the request to each token; tokens of one round share theirs. lost: seconds
    for which its threads have waited for a core by then (bench/timing.py). memory: bytes of the
    worker, as `machine.resident`; its peak counts everything since the worker started, so whoever
    compares peaks asks each worker for one mode, and gives it a draft only to draft with. notes:
    what the peer itself has counted, if anything.
    """

    tokens: list[int]
    times: list[float]
    lost: list[float]
    memory: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def first_seconds(self) -> float:
        """Time to the first token: all of the prefill, and the first round where one drafts."""
        return self.times[0]

    def steps(self) -> list[Sample]:
        """The rounds after the first; without drafts, a token each."""
        ends = [i for i, time in enumerate(self.times) if self.times[i + 1 : i + 2] != [time]]
        return [self._between(i, j) for i, j in pairwise(ends)]

    def round_tokens(self) -> list[int]:
        """Of each round after the first."""
        counts = [len(list(tokens)) for _, tokens in groupby(self.times)]
        return counts[1:]

    def decoding(self) -> Sample:
        """Seconds a token, of the tokens after the first round."""
        after = len(self.times) - self.times.count(self.times[0])
        if not after:
            raise ValueError("the text has one round: no token after the prefill")
        whole = self._between(0, -1)
        return Sample(whole.seconds / after, whole.lost)

    def _between(self, i: int, j: int) -> Sample:
        seconds = self.times[j] - self.times[i]
        return Sample(seconds, (self.lost[j] - self.lost[i]) / seconds)


class Peer:
    """The worker of one peer on one checkpoint, or a pair; a context manager.

    Raises:
        Unavailable: its packages are missing, or it does not take the checkpoint.
    """

    def __init__(
        self,
        name: str,
        target: Path,
        *,
        draft: Path | None = None,
        threads: int,
        work: Path,
        precision: str = "float32",
        max_len: int = MAX_LEN,
        slots: int = 1,
    ):
        if (reason := missing(name)) is not None:
            raise Unavailable(reason)
        self.name, self.kind = name, PEERS[name]
        if precision not in self.kind.precisions:
            raise Unavailable(f"{name} has no weights of {precision}")
        setup = Setup(
            target=str(target.resolve()),  # the worker has its own working directory
            draft=str(draft.resolve()) if draft else None,
            threads=threads,
            precision=precision,
            work=str(work.resolve()),
            max_len=max_len,
            slots=slots,
        )
        self._prompts: dict[str, list[int]] = {}  # the last of each mode
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.peer_worker", name, json.dumps(asdict(setup))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        try:
            # Versions; dtype of the weights; load_seconds, from the converted files; bytes of
            # weights, draft_weights, a cache_element, and before: the process without a model.
            self.facts: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended before
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # amid a text, or a conversion
            self._process.terminate()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            why = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise Unavailable(f"its worker ended with {why}")
        answer = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        return answer

    def generate(self, request: Request) -> Text:
        """Decode one text.

        Raises:
            Unavailable: it has no such mode, or failed.
            ValueError: the prompt is the one before in this mode: a cache of prefixes, which a
                worker should not have, would show.
        """
        if request.prompt == self._prompts.get(request.mode):
            raise ValueError("the same prompt twice in a row")
        self._prompts[request.mode] = list(request.prompt)
        return self._checked(self._ask("generate", request), request)

    def batch(self, request: Batch) -> list[Text]:
        """Decode texts together; all their times are from the request on. Raises Unavailable."""
        texts: list[dict[str, Any]] = self._ask("batch", request)["texts"]
        return [self._checked(text, request) for text in texts]

    def costs(self, position: int, gamma: int) -> StepCosts:
        """Of calls at that row of the cache, with 1 to gamma + 1 tokens; of Outrider alone."""
        return StepCosts(**self._ask("costs", {"position": position, "gamma": gamma}))

    def _ask(self, call: str, content: Request | Batch | dict[str, int]) -> dict[str, Any]:
        if not isinstance(content, dict):
            if content.mode not in self.kind.modes:
                raise Unavailable(f"{self.name} has no mode {content.mode}")
            content = asdict(content)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # there will be no answer, which says why
            self._process.stdin.write(json.dumps({call: content}) + "\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    @staticmethod
    def _checked(answer: dict[str, Any], request: Request | Batch) -> Text:
        text = Text(**answer)
        if len(text.tokens) != request.new_tokens:
            raise Unavailable(f"it gave {len(text.tokens)} of {request.new_tokens} tokens")
        return text
