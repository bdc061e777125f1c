"""llama.cpp, through llama-cpp-python and the draft models of its `Llama.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from .protocol import Request, Setup
from .worker import Arrivals, convert_checkpoint

Ids = npt.NDArray[np.intc]
# Turns off the filters that the binding applies by default.
UNRESTRICTED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
library: Any = llama_cpp


def _argmax(context: Any, row: int, vocab_size: int) -> int:
    """The argmax of a row of logits of the last call."""
    logits = library.llama_get_logits_ith(context, row)
    return int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())


class _CountingLlama(llama_cpp.Llama):  # type: ignore[misc]  # no annotations to check
    """Counts evaluations. A round is one evaluation, however many tokens it yields."""

    evaluations = 0

    def eval(self, tokens: Sequence[int]) -> None:
        self.evaluations += 1
        super().eval(tokens)


class _Draft(LlamaDraftModel):  # type: ignore[misc]
    """Proposes the draft's argmax, gamma times. Reuses the cached prefix that agrees with the
    text."""

    def __init__(self, model: Any):
        self.model, self.gamma = model, 0

    def __call__(self, input_ids: Ids, /, **options: Any) -> Ids:
        model = self.model
        size = min(model.n_tokens, len(input_ids) - 1)  # evaluate at least one, for its logits
        same = model.input_ids[:size] == input_ids[:size]
        model.n_tokens = size if same.all() else int(same.argmin())
        unread: list[int] = input_ids[model.n_tokens :].tolist()
        drafted: list[int] = []
        for _ in range(self.gamma):
            model.eval(unread)
            unread = [_argmax(model.ctx, -1, model.n_vocab())]
            drafted += unread
        return np.array(drafted, np.intc)


class LlamaWorker:
    """See `worker.Worker`. The models of a mode are loaded at the first request for it."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._target = self._write(setup.target)
        self._draft = self._write(setup.draft) if setup.draft else None
        self._models: dict[str, Any] = {}
        self._batch: _BatchContext | None = None

    def load(self) -> dict[str, Any]:
        self._model("plain")
        return {
            "llama-cpp-python": llama_cpp.__version__,
            "dtype": self._setup.precision,
            "weights": self._target.stat().st_size,
            "draft_weights": self._draft.stat().st_size if self._draft else 0,
            "cache_element": 4 if self._setup.precision == "float32" else 2,
        }

    def _write(self, checkpoint: Path) -> Path:
        precision = self._setup.precision
        file = self._setup.work / "gguf" / f"{checkpoint.name}-{precision}" / "model.gguf"
        convert_checkpoint(
            file.parent, checkpoint, f"{__package__}.gguf", checkpoint, file,
            "--type", precision, "--threads", self._setup.threads,
        )  # fmt: skip
        return file

    def _model(self, mode: str) -> Any:
        if mode not in self._models:
            draft: Any = None
            if mode == "lookup":
                draft = LlamaPromptLookupDecoding()
            elif mode == "draft":
                if self._draft is None:
                    raise ValueError("no draft model was given")
                draft = _Draft(self._read(self._draft))
            # For drafts the binding needs logits of all rows of the cache.
            more = {"draft_model": draft, "logits_all": True} if draft else {}
            self._models[mode] = self._read(self._target, **more)
        return self._models[mode]

    def _read(self, file: Path, **more: Any) -> Any:
        # llama.cpp's cache is float16 by default; a float32 model should be float32 throughout.
        cache = library.GGML_TYPE_F32 if self._setup.precision == "float32" else None
        return _CountingLlama(
            str(file),
            n_ctx=self._setup.max_len,
            n_threads=self._setup.threads,
            n_threads_batch=self._setup.threads,
            type_k=cache,
            type_v=cache,
            verbose=False,
            **more,
        )

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        rows = len(request.prompts[0]) + request.new_tokens + request.gamma
        if rows > self._setup.max_len:
            raise ValueError(f"the text needs {rows} rows of {self._setup.max_len}")
        if len(request.prompts) > 1:
            if request.mode != "plain":
                raise ValueError("the binding drafts for one text at a time")
            self._batch = self._batch or _BatchContext(self._model("plain"), self._setup)
            self._batch.generate(request, arrivals)
            return
        model = self._model(request.mode)
        model.reset()  # otherwise it reuses the longest common prefix of the prompts
        model.set_seed(request.seed)
        if request.mode == "lookup":
            model.draft_model.num_pred_tokens = request.gamma
        elif request.mode == "draft":
            model.draft_model.model.reset()
            model.draft_model.gamma = request.gamma
        tokens = model.generate(request.prompts[0], temp=request.temperature, **UNRESTRICTED)
        seen = None
        for token in islice(tokens, request.new_tokens):
            arrivals.add([(0, [int(token)])], same_round=model.evaluations == seen)
            seen = model.evaluations


class _BatchContext:
    """A second context on the loaded weights, with a cache for several texts. Uses llama.cpp's own
    interface, where a call may contain tokens of several texts."""

    def __init__(self, model: Any, setup: Setup):
        parameters = model.context_params
        parameters.n_ctx, parameters.n_seq_max = setup.slots * setup.max_len, setup.slots
        parameters.n_batch = setup.max_len
        self._context = library.llama_init_from_model(model.model, parameters)
        self._tokens = library.llama_batch_init(setup.max_len, 0, 1)
        self._vocab_size = model.n_vocab()

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        library.llama_memory_clear(library.llama_get_memory(self._context), False)
        last: list[int] = []
        for number, prompt in enumerate(request.prompts):
            last += self._call([(number, i, token) for i, token in enumerate(prompt)])
            arrivals.add([(number, last[-1:])])
        length = len(request.prompts[0])
        for position in range(length, length + request.new_tokens - 1):
            last = self._call([(text, position, token) for text, token in enumerate(last)])
            arrivals.add((text, [token]) for text, token in enumerate(last))

    def _call(self, rows: Sequence[tuple[int, int, int]]) -> list[int]:
        """Evaluate rows of (text, position, token); returns the argmax after the last row of each
        text."""
        call, ends = self._tokens, {text: i for i, (text, _, _) in enumerate(rows)}
        call.n_tokens = len(rows)
        for i, (text, position, token) in enumerate(rows):
            call.token[i], call.pos[i] = token, position
            call.n_seq_id[i], call.seq_id[i][0] = 1, text
            call.logits[i] = i == ends[text]
        if status := library.llama_decode(self._context, call):
            raise RuntimeError(f"llama_decode returned {status}")
        return [_argmax(self._context, end, self._vocab_size) for end in ends.values()]
