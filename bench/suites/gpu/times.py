"""Times of a pair of engines on a GPU: ratios from one run, compared with memory bandwidth and
theory.

A round is measured by its wall time and, with the device's own clock, the times of drafts and
verification. The difference is the host's share: gaps in which the GPU waits. A round must read the
draft's weights gamma times, the target's once, and the rows in the caches; the memory bandwidth is
that of a copy measured in the same run. The device's clock also counts gaps between the kernels of
a graph as work: these are measured by profiling one round.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import Options, TextEngine
from runtime.stats import Stats
from runtime.theory.formulas import speedup

from ...core.clock import Clock, sample
from ...core.costs import Traffic
from ...core.fit import rounded
from ...core.record import Run
from ...core.runs import Way, decode_all, measured_speedup
from .constructed import (
    DTYPE,
    PROMPT_LEN,
    check_bigram,
    engine_weights,
    free_gpu_memory,
    is_constructed,
    open_pair,
    random_prompts,
)  # fmt: skip
from .profiling import longest_round, profile_kernels, summarise
from .suite import NO_GPU, goal

if TYPE_CHECKING:
    import torch

SLOTS = 4


class Times:
    """One run on a pair. Each method in `NAMES` is a section and returns its figures."""

    # The most important first, because a time limit may cut off the rest.
    NAMES = (
        "copy", "rounds", "bigram", "transformers", "without_graphs", "memory", "slots", "profile",
        "transformers_static",  # last, because its compilation may take long
    )  # fmt: skip

    def __init__(self, folder: Path, device: str, quick: bool):
        self.folder, self.device, self.gpu = folder, device, device != "cpu"
        self.tokens, self.turns, self.peer_tokens = (24, 2, 8) if quick else (160, 5, 96)
        self.gammas = (2,) if quick else (2, 4, 8)
        self.middle = self.gammas[len(self.gammas) // 2]
        self.bandwidth: float | None = None
        self._free_memory = [self._free_bytes()]
        begin = time.perf_counter()
        self.engine = open_pair(folder, device, slots=SLOTS)
        self.load_s = round(time.perf_counter() - begin, 2)
        self._free_memory.append(self._free_bytes())
        pair, self.prompts = self.engine.manifest.pair, random_prompts(self.engine, 8)
        self.room = pair.max_len - PROMPT_LEN
        assert pair.draft is not None
        roles = "target", "draft"
        sizes = (weight_bytes(folder / role, self.engine.memory[role]) for role in roles)
        rows = (facts.cache_bytes(1) / pair.capacity for facts in (pair.target, pair.draft))
        (target, row), (draft, draft_row) = zip(sizes, rows, strict=True)
        self.traffic = Traffic(target, row, PROMPT_LEN + self.tokens / 2, draft, draft_row)

    def _free_bytes(self) -> int:
        if not self.gpu:
            return 0
        from runtime.backends.cuda import Cuda

        return Cuda(0).memory_info()[0]

    def _options(self, gamma: int, tokens: int) -> dict[str, Any]:
        return {"gamma": gamma, "max_new_tokens": min(tokens, self.room), "ignore_eos": True}

    # Sections

    def copy(self) -> dict[str, Any]:
        if not self.gpu:
            return NO_GPU
        from . import kernel

        self.bandwidth = kernel.copy_bandwidth()
        free_gpu_memory()
        return {"bytes_per_second": round(self.bandwidth)}

    def rounds(self) -> dict[str, Any]:
        """Rounds of each gamma, and their speedup over plain decoding compared with the theory."""
        rows = self._sweep(self.engine, 0.0, (0, *self.gammas))
        rows |= self._sweep(self.engine, 1.0, (0, self.middle))
        if not self.gpu:
            return rows
        host = goal(max(row["host_share"] for row in rows.values()), 0.05)
        found = {**rows, "graph_nodes": self._graph_nodes(), "goal": host}
        if self.bandwidth:
            plain = rows["temperature 0, gamma 0"]["of_copy_bandwidth"]
            found["bandwidth_goal"] = goal(plain, 0.7, at_least=True)
        return found

    def _graph_nodes(self) -> dict[str, int]:
        """Number of kernels and copies in a round of one slot; without a graph, each is a
        launch."""
        rounds: Any = self.engine.decoder.rounds
        return {f"gamma {shape.gamma}": nodes for shape, nodes in rounds.graph_nodes().items()}

    def bigram(self) -> dict[str, Any]:
        """Compare texts at temperature 0 with the output of these weights computed by NumPy, for
        every gamma, in a single slot and in all slots at once."""
        if not is_constructed(self.engine):
            return {"passed": None, "reason": "the pair is not constructed"}
        texts = []
        for gamma in (0, *self.gammas):
            options = self._options(gamma, self.tokens)
            texts.append((self.prompts[0], self.engine.generate(self.prompts[0], **options)))
            together = self.engine.batch((p, Options(**options)) for p in self.prompts[:SLOTS])
            texts += [(self.prompts[i], text) for i, text in together]
        context, output = [], []
        for prompt, text in texts:
            context += [prompt[-1], *text.token_ids[:-1]]
            output += text.token_ids
        return {
            "texts": len(texts),
            **check_bigram(engine_weights(self.engine, "target"), context, output),
        }

    def without_graphs(self) -> dict[str, Any]:
        if not self.gpu:
            return NO_GPU
        engine = open_pair(self.folder, self.device, graphs=False)
        found = self._sweep(engine, 0.0, (0, self.middle))
        del engine
        free_gpu_memory()
        return found

    def profile(self) -> dict[str, Any]:
        """Profile one round of the usual gamma, and one plain round."""
        if not self.gpu:
            return NO_GPU
        result = {}
        for gamma in (0, self.middle):
            options = self._options(gamma, 8 * (gamma + 1))
            found = longest_round(
                profile_kernels(lambda o=options: self.engine.generate(self.prompts[0], **o))  # type: ignore[misc]
            )
            result[f"gamma {gamma}"] = summarise(found) if found else {"reason": "no whole round"}
        return result

    def _sweep(
        self, engine: TextEngine, temperature: float, gammas: Sequence[int]
    ) -> dict[str, Any]:
        """Decode texts with each gamma in turn, 0 first. The first text of each captures graphs."""
        ways = {g: Way(engine, {"gamma": g, "temperature": temperature}) for g in gammas}
        tokens = min(self.tokens, self.room)
        texts = [
            decode_all(ways, self.prompts[turn % len(self.prompts)], tokens, turn, Clock())
            for turn in range(self.turns + 1)
        ][1:]
        rows = {gamma: self._figures(gamma, [text[gamma] for text in texts]) for gamma in gammas}
        step = rows[0]["draft_ms"] + rows[0]["verify_ms"]
        for gamma in gammas[1:]:
            row = rows[gamma]
            c, width = row["draft_ms"] / gamma / step, row["verify_ms"] / step
            ratio, rounds = measured_speedup(texts, gamma, 0), row["rounds"]
            row |= {
                "ratio": ratio.json_object(),
                # When a text ends, a round that was launched ahead remains, which is not timed.
                "ratio_with_rounds_left": rounded(
                    ratio.median * rounds / (rounds + self.gpu * len(texts))
                ),
                "c": round(c, 4), "verify_width": round(width, 4),
                "theorem_3_8": round(speedup(row["alpha"], gamma, c, width), 4),
            }  # fmt: skip
        return {f"temperature {temperature:g}, gamma {g}": row for g, row in rows.items()}

    def _figures(self, gamma: int, texts: Sequence[Run]) -> dict[str, Any]:
        stats = Stats.total(x.stats for x in texts)
        device = stats.time_draft + stats.time_verify
        size = self.traffic.round_bytes(gamma)
        row: dict[str, Any] = {
            "rounds": stats.rounds,
            "tokens_per_second": round(statistics.median(1 / x.stats.tpot for x in texts), 2),
            "wall_ms": _ms(stats.time_rounds / stats.rounds),
            "draft_ms": _ms(stats.time_draft / stats.rounds),
            "verify_ms": _ms(stats.time_verify / stats.rounds),
            "host_share": round(1 - device / stats.time_rounds, 4),
            "tau": round(stats.mean_acceptance_length, 3),
            "alpha": round(stats.acceptance_rate, 4),
            "bytes": round(size), "bytes_per_second": round(size * stats.rounds / device),
        }  # fmt: skip
        if self.bandwidth:
            row["of_copy_bandwidth"] = round(row["bytes_per_second"] / self.bandwidth, 4)
        return row

    def slots(self) -> dict[str, Any]:
        """All slots at once: tokens per second over all texts, and the time of a round."""
        result = {}
        for gamma in (0, self.middle):
            options = Options(**self._options(gamma, self.tokens))
            for _ in range(2):  # the first is the warm-up
                begin = time.perf_counter()
                texts = dict(self.engine.batch((p, options) for p in self.prompts[:SLOTS]))
                seconds = time.perf_counter() - begin
            first = texts[0].stats  # the others ran during most of its time
            tokens = sum(len(text.tokens) for text in texts.values())
            result[f"gamma {gamma}"] = {
                "slots": SLOTS, "tokens_per_second": round(tokens / seconds, 2),
                "wall_ms": _ms(first.time_rounds / first.rounds),
            }  # fmt: skip
        return result

    def memory(self) -> dict[str, Any]:
        """GPU memory used since before `load`, compared with the plan. torch reports what it has
        reserved beyond the weights: cuBLAS workspaces, activations, the pool of the graphs. The
        rest are modules and CUDA graphs."""
        plan, planned = self.engine.memory, sum(self.engine.memory.values())
        found = {"load_s": self.load_s, "plan": plan, "planned": planned}
        if not self.gpu:
            return found | NO_GPU
        import torch

        free_gpu_memory()  # memory that the peers have left
        before, loaded = self._free_memory
        used = before - self._free_bytes()
        beyond = max(0, torch.cuda.memory_reserved() - plan["target"] - plan.get("draft", 0))
        counted = planned - plan["activations"] + beyond
        return {
            **found, "used": {"loaded": before - loaded, "after_rounds": used},
            "torch_beyond_weights": beyond, "allowed": plan["activations"],
            "modules_and_graphs": used - counted, "goal": goal(abs(used / counted - 1), 0.1),
        }  # fmt: skip

    def transformers(self) -> dict[str, Any]:
        """Compare with Transformers' `generate` on the same device, plain and assisted, with its
        defaults: kernel by kernel, with a growing cache.

        Without cuDNN's attention, which torch prefers on Hopper: it prepares a plan for each new
        length, so a growing cache needs hundreds of them. Their time is unknown, perhaps a minute.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(others):
            return self._compare(
                {
                    "transformers": {},
                    "transformers, assistant_model": {"assistant_model": self._peer("draft")},
                }
            )

    def transformers_static(self) -> dict[str, Any]:
        """Compare with `generate` with a static cache, which it compiles on a GPU."""
        return self._compare({"transformers, static cache": {"cache_implementation": "static"}})

    def _compare(self, peers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Compare whole calls of Outrider and of Transformers. peers: options of the target's
        `generate`, by name."""
        target = self._peer("target")
        tokens, prompt = min(self.peer_tokens, self.room), self.prompts[1]

        def ours(gamma: int) -> Callable[[], list[int]]:
            options = self._options(gamma, tokens)
            return lambda: self.engine.generate(prompt, **options).token_ids

        calls = {"outrider plain": ours(0), f"outrider gamma {self.middle}": ours(self.middle)}
        calls |= {
            name: partial(hf_generate, target, prompt, tokens, **options)
            for name, options in peers.items()
        }
        result: dict[str, Any] = {"new_tokens": tokens, "attention": "sdpa", "dtype": DTYPE}
        plain = calls["outrider plain"]()
        for name, call in calls.items():
            agree = [a == b for a, b in zip(call(), plain, strict=True)]
            seconds = statistics.median(sample(call).seconds for _ in range(3))
            result[name] = {
                "tokens_per_second": round(tokens / seconds, 2),
                "same_first_tokens": [*agree, False].index(False),
            }
        return result

    def _peer(self, role: str) -> Any:
        shared = engine_weights(self.engine, role) if is_constructed(self.engine) else None
        return transformers_model(self.folder / role, self.device, shared)


def hf_generate(model: Any, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    """Generate with Transformers' own `generate` and its options."""
    import torch

    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, **options,
        )  # fmt: skip
    answer: list[int] = text[0, len(prompt) :].tolist()  # waits for the device
    return answer


def weight_bytes(checkpoint: Path, size: int) -> int:
    """Bytes that a step reads of `size` bytes of weights: of an untied embedding, it reads only one
    row per token."""
    config = json.loads((checkpoint / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    return size - (0 if tied else 2 * int(config["vocab_size"]) * int(config["hidden_size"]))


def transformers_model(
    checkpoint: Path, device: str, shared: Mapping[str, torch.Tensor] | None
) -> Any:
    """Load a Transformers model on a device. shared: weights of a constructed pair's engine, by
    their names in its graph, which the model then shares; None to load the checkpoint's."""
    import torch
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    options = {"dtype": getattr(torch, DTYPE), "attn_implementation": "sdpa"}
    if shared is None:
        model = library.AutoModelForCausalLM.from_pretrained(checkpoint, **options).to(device)
    else:
        config = library.AutoConfig.from_pretrained(checkpoint)
        with torch.device("meta"):
            model = library.AutoModelForCausalLM.from_config(config, **options)
        named = {name.partition("decoder.model.")[2]: weight for name, weight in shared.items()}
        state = {name: named[name] for name in model.state_dict()}
        model.load_state_dict(state, assign=True)
        # Its buffers are computed, not loaded.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.generation_config.eos_token_id = None  # so that no text ends early
    return model.eval()


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)
