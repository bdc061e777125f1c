"""llama.cpp, through llama-cpp-python and its drafts for `Llama.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from .protocol import Batch, Request, Setup
from .worker import Arrivals, arrived_together, converted, loading

Ids = npt.NDArray[np.intc]
# The binding's defaults restrict draws; these do not.
UNRESTRICTED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
library: Any = llama_cpp


class _Counting(llama_cpp.Llama):  # type: ignore[misc]  # the binding has no annotations to check
    """Counts its evaluations: a round of drafts is one, however many tokens it yields."""

    evaluations = 0

    def eval(self, tokens: Sequence[int]) -> None:
        self.evaluations += 1
        super().eval(tokens)


class _Draft(LlamaDraftModel):  # type: ignore[misc]
    """The draft's argmax, gamma times. Its cache keeps what still agrees with the text."""

    def __init__(self, model: Any):
        self.model, self.gamma = model, 0

    def __call__(self, input_ids: Ids, /, **options: Any) -> Ids:
        model = self.model
        size = min(model.n_tokens, len(input_ids) - 1)  # one at least is read: its logits are due
        same = model.input_ids[:size] == input_ids[:size]
        model.n_tokens = size if same.all() else int(same.argmin())
        unread: list[int] = input_ids[model.n_tokens :].tolist()
        drafted: list[int] = []
        for _ in range(self.gamma):
            model.eval(unread)
            logits = library.llama_get_logits_ith(model.ctx, -1)
            unread = [int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())]
            drafted += unread
        return np.array(drafted, np.intc)


class LlamaWorker:
    """See `worker.Worker`. A mode's models are loaded with the first request for it."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._target = self._write(setup.target)
        self._draft = self._write(setup.draft) if setup.draft else None
        self._models: dict[str, Any] = {}
        self._many: _Many | None = None
        # A library that is built wrongly for this machine fails here, not amid a comparison.
        _, self.load = loading(lambda: self._model("plain"))
        self.generate(Request([1, 2, 3], 1), Arrivals())
        self.facts = {
            "llama-cpp-python": llama_cpp.__version__,
            "dtype": setup.precision,
            "weights": self._target.stat().st_size,
            "draft_weights": self._draft.stat().st_size if self._draft else 0,
            "cache_element": 4 if setup.precision == "float32" else 2,
        }

    def _write(self, checkpoint: str) -> Path:
        source, precision = Path(checkpoint), self._setup.precision
        folder = Path(self._setup.work) / "gguf" / f"{source.name}-{precision}"
        file = folder / "model.gguf"
        converted(
            folder, source, f"{__package__}.gguf", source, file,
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
                draft = _Draft(self._load(self._draft))
            # The binding keeps logits of drafts where they fit: in as many rows as the cache has.
            more = {"draft_model": draft, "logits_all": True} if draft else {}
            self._models[mode] = self._load(self._target, **more)
        return self._models[mode]

    def _load(self, file: Path, **more: Any) -> Any:
        # llama.cpp's cache is float16 unless it is told; a float32 model is to be one throughout.
        cache = library.GGML_TYPE_F32 if self._setup.precision == "float32" else None
        return _Counting(
            str(file),
            n_ctx=self._setup.max_len,
            n_threads=self._setup.threads,
            n_threads_batch=self._setup.threads,
            type_k=cache,
            type_v=cache,
            verbose=False,
            **more,
        )

    def generate(self, request: Request, text: Arrivals) -> None:
        rows = len(request.prompt) + request.new_tokens + request.gamma
        if rows > self._setup.max_len:
            raise ValueError(f"the text needs {rows} rows of {self._setup.max_len}")
        model = self._model(request.mode)
        model.reset()  # else it keeps the longest prefix that the prompts share
        model.set_seed(request.seed)
        if request.mode == "lookup":
            model.draft_model.num_pred_tokens = request.gamma
        elif request.mode == "draft":
            model.draft_model.model.reset()
            model.draft_model.gamma = request.gamma
        tokens = model.generate(request.prompt, temp=request.temperature, **UNRESTRICTED)
        seen = None
        for token in islice(tokens, request.new_tokens):
            text.arrived([int(token)], same_round=model.evaluations == seen)
            seen = model.evaluations

    def batch(self, request: Batch, texts: Sequence[Arrivals]) -> None:
        """Through llama.cpp's own interface, in which a call may have tokens of several texts."""
        if request.mode != "plain":
            raise ValueError("the binding drafts for one text at a time")
        if self._many is None:
            self._many = _Many(self._model("plain"), self._setup)
        self._many.generate(request, texts)


class _Many:
    """A second context on the loaded weights, with a cache for several texts."""

    def __init__(self, model: Any, setup: Setup):
        parameters = model.context_params
        parameters.n_ctx, parameters.n_seq_max = setup.slots * setup.max_len, setup.slots
        parameters.n_batch = setup.max_len
        self._context = library.llama_init_from_model(model.model, parameters)
        self._tokens = library.llama_batch_init(setup.max_len, 0, 1)
        self._vocab_size = model.n_vocab()

    def generate(self, request: Batch, texts: Sequence[Arrivals]) -> None:
        library.llama_memory_clear(library.llama_get_memory(self._context), False)
        last: list[int] = []
        for number, (prompt, text) in enumerate(zip(request.prompts, texts, strict=True)):
            last += self._call([(number, i, token) for i, token in enumerate(prompt)], [number])
            text.arrived(last[-1:])
        every, length = range(len(request.prompts)), len(request.prompts[0])
        for position in range(length, length + request.new_tokens - 1):
            last = self._call([(i, position, last[i]) for i in every], every)
            arrived_together(texts, [[token] for token in last])

    def _call(self, rows: Sequence[tuple[int, int, int]], texts: Sequence[int]) -> list[int]:
        """rows: (text, position, token). The argmax after the last row of each of the texts."""
        call, ends = self._tokens, {text: i for i, (text, _, _) in enumerate(rows)}
        call.n_tokens = len(rows)
        for i, (text, position, token) in enumerate(rows):
            call.token[i], call.pos[i] = token, position
            call.n_seq_id[i], call.seq_id[i][0] = 1, text
            call.logits[i] = i == ends[text]
        if status := library.llama_decode(self._context, call):
            raise RuntimeError(f"llama_decode gave {status}")
        rows_of = [library.llama_get_logits_ith(self._context, ends[text]) for text in texts]
        return [int(np.ctypeslib.as_array(r, (self._vocab_size,)).argmax()) for r in rows_of]
