"""Transformers as the peer, in a process of its own: its threads and memory stay out of ours.

As a module it is the worker: it reads an attention implementation a line and answers with the
times of the tokens of one `generate` there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from .timing import Sample, lost_seconds

ATTENTION = ("sdpa", "eager")


def missing() -> str | None:
    """Why there is nothing to compare with, None if there is."""
    absent = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    return f"{' and '.join(absent)} not installed" if absent else None


class Transformers:
    """The worker of one checkpoint; a context manager."""

    def __init__(self, checkpoint: Path, prompt: list[int], new_tokens: int, threads: int):
        options = [str(checkpoint), json.dumps(prompt), str(new_tokens), str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.dtype = self._answer()["dtype"]

    def __enter__(self) -> Transformers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the Transformers worker ended early")
        return json.loads(line)

    def samples(self, attention: str) -> list[Sample]:
        """The tokens of one text by greedy decoding, prefill and first token left out."""
        assert self._process.stdin is not None
        self._process.stdin.write(attention + "\n")
        self._process.stdin.flush()
        return [Sample(*pair) for pair in self._answer()]


class _Clock:
    """A streamer that only notes when tokens come; the first `put` is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.lost: list[float] = []

    def put(self, _: object) -> None:
        self.times.append(time.perf_counter())
        self.lost.append(lost_seconds())

    def end(self) -> None:
        pass


def _work(checkpoint: str, prompt: list[int], new_tokens: int, threads: int) -> None:
    import torch
    import transformers

    library: Any = transformers  # most of it is not annotated
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    model = library.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # so that every text has all its tokens
    ids = torch.tensor([prompt])
    print(json.dumps({"dtype": str(model.dtype).removeprefix("torch.")}), flush=True)
    for line in sys.stdin:
        model.set_attn_implementation(line.strip())
        clock = _Clock()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                streamer=clock,
            )
        # The prompt and the first token are the prefill's.
        steps = zip(pairwise(clock.times[1:]), pairwise(clock.lost[1:]), strict=True)
        answer = [(t - s, (b - a) / (t - s)) for (s, t), (a, b) in steps]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("checkpoint", "prompt", "new_tokens", "threads"):
        parser.add_argument(name)
    given = parser.parse_args()
    _work(given.checkpoint, json.loads(given.prompt), int(given.new_tokens), int(given.threads))
