"""What a pair of engines brings on a GPU: ratios of one run beside what physics and theory allow.

Of a round: its wall time, and from the device's own clock the time of drafts and verification. What
the two do not share is the host's: gaps in which the GPU waits. A round has to read the draft's
weights gamma times, the target's once and the rows that the caches have; a copy measured in the
same run says how fast memory is. The speedup that theory expects is that of Leviathan et al. 2023,
"Fast Inference from Transformers via Speculative Decoding", Theorem 3.8.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Options, TextEngine, load
from runtime.files.errors import first_line
from runtime.stats import Stats
from runtime.theory.formulas import speedup

from .engines_build import DTYPE, Built

PROMPT = 64  # tokens
SLOTS = 4


@dataclass(frozen=True)
class Scale:
    """How much is timed. rounds: of each configuration, at least. tokens: of a text. turns: of what
    is compared, in alternation."""

    rounds: int = 100
    tokens: int = 160
    turns: int = 5
    gammas: tuple[int, ...] = (2, 4, 8)
    peer_tokens: int = 96


QUICK = Scale(6, 24, 2, (2,), 8)


def weight_bytes(checkpoint: Path, size: int) -> int:
    """What a step reads of `size` bytes of weights: of an untied embedding one row a token."""
    config = json.loads((checkpoint / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    return size - (0 if tied else 2 * int(config["vocab_size"]) * int(config["hidden_size"]))


class Times:
    """One run. Each method is a section; what it returns goes into the report under its name."""

    def __init__(self, built: Built, device: str, scale: Scale):
        self.built, self.device, self.scale = built, device, scale
        self.gpu = device != "cpu"
        self.bandwidth: float | None = None
        self.plain: dict[str, float] = {}
        self.rounds: dict[int, dict[str, Any]] = {}
        free = self._free()
        begin = time.perf_counter()
        self.engine = load(built.bundle, device=device, slots=SLOTS, verify=False)
        self.load_s = round(time.perf_counter() - begin, 2)
        self._before, self._loaded = free, self._free()
        rng = np.random.default_rng(0)
        size = self.engine.decoder.vocab_size
        self.prompts: list[list[int]] = [rng.integers(1, size, PROMPT).tolist() for _ in range(8)]
        facts = self.engine.manifest.pair
        self.room = facts.max_len - PROMPT
        assert facts.draft is not None
        self.read = {
            role: weight_bytes(Path(folder), self.engine.memory[role])
            for role, folder in (("target", built.target), ("draft", built.draft))
        }

    def _free(self) -> int:
        if not self.gpu:
            return 0
        from runtime.backends.cuda import Cuda

        return Cuda(int(self.device.partition(":")[2] or 0)).memory()[0]

    def generate(
        self, engine: TextEngine, turn: int, gamma: int, *, tokens: int = 0, temperature: float = 0
    ) -> tuple[float, list[int], Stats]:
        """Seconds of the whole call, the text, its counts."""
        begin = time.perf_counter()
        result = engine.generate(
            self.prompts[turn % len(self.prompts)], gamma=gamma, ignore_eos=True, seed=turn,
            max_new_tokens=min(tokens or self.scale.tokens, self.room), temperature=temperature,
        )  # fmt: skip
        return time.perf_counter() - begin, result.token_ids, result.stats

    # Sections

    def copy(self) -> dict[str, Any]:
        if not self.gpu:
            return {"bytes_per_second": None, "reason": "no GPU"}
        import torch

        from .kernel_gpu import copy_bandwidth

        self.bandwidth = copy_bandwidth()
        torch.cuda.empty_cache()
        return {"bytes_per_second": round(self.bandwidth)}

    def of_rounds(self) -> dict[str, Any]:
        """Rounds of each gamma, replayed as graphs."""
        result = {}
        for gamma in (0, *self.scale.gammas):
            row = self.rounds[gamma] = self._rounds(self.engine, gamma)
            result[f"gamma {gamma}"] = row
        return result

    def without_graphs(self) -> dict[str, Any]:
        if not self.gpu:
            return {"rounds": None, "reason": "no GPU"}
        engine = load(self.built.bundle, device=self.device, graphs=False, verify=False)
        return {f"gamma {gamma}": self._rounds(engine, gamma) for gamma in (0, self._middle)}

    @property
    def _middle(self) -> int:
        return self.scale.gammas[len(self.scale.gammas) // 2]

    def _rounds(self, engine: TextEngine, gamma: int) -> dict[str, Any]:
        self.generate(engine, 0, gamma)  # graphs are captured here
        stats, turn = Stats(), 0
        while stats.rounds < self.scale.rounds:
            turn += 1
            stats.add(self.generate(engine, turn, gamma)[2])
        device = stats.time_draft + stats.time_verify
        row: dict[str, Any] = {
            "rounds": stats.rounds,
            "wall_ms": _ms(stats.time_rounds / stats.rounds),
            "draft_ms": _ms(stats.time_draft / stats.rounds),
            "verify_ms": _ms(stats.time_verify / stats.rounds),
            "host_share": round(1 - device / stats.time_rounds, 4),
            "tau": round(stats.mean_acceptance_length, 3),
            "alpha": round(stats.accepted / max(1, stats.examined), 4),
        }
        facts = engine.manifest.pair
        assert facts.draft is not None
        length = PROMPT + stats.output_tokens / turn / 2  # the mean
        needed = self.read["target"] + gamma * self.read["draft"]
        rows = facts.target.cache_bytes(1) + gamma * facts.draft.cache_bytes(1)
        row["bytes"] = round(needed + rows * length / facts.capacity)
        row["bytes_with_whole_caches"] = needed + rows
        row["bytes_per_second"] = round(row["bytes"] * stats.rounds / device)
        if self.bandwidth:
            row["of_copy_bandwidth"] = round(row["bytes_per_second"] / self.bandwidth, 4)
        return row

    def speedup(self) -> dict[str, Any]:
        """Speculative against plain decoding, a pair of texts at a time, beside the theory."""
        plain = self.rounds[0]
        step = plain["draft_ms"] + plain["verify_ms"]
        result: dict[str, Any] = {}
        for temperature, gammas in ((0.0, self.scale.gammas), (1.0, (self._middle,))):
            for gamma in gammas:
                pairs, total = [], Stats()
                for turn in range(self.scale.turns + 1):
                    both = [
                        self.generate(self.engine, turn, g, temperature=temperature)[2]
                        for g in (gamma, 0)[:: 1 if turn % 2 else -1]
                    ]
                    fast, slow = both if turn % 2 else both[::-1]
                    if turn:  # the first is the warm-up
                        pairs.append((1 / fast.tpot(), 1 / slow.tpot()))
                        total.add(fast)
                ratios = [fast / slow for fast, slow in pairs]
                row = self.rounds[gamma]
                alpha = total.accepted / max(1, total.examined)
                c, width = row["draft_ms"] / gamma / step, row["verify_ms"] / step
                result[f"temperature {temperature:g}, gamma {gamma}"] = {
                    "tokens_per_second": round(statistics.median(p[0] for p in pairs), 2),
                    "plain_tokens_per_second": round(statistics.median(p[1] for p in pairs), 2),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_low": round(min(ratios), 3), "ratio_high": round(max(ratios), 3),
                    "alpha": round(alpha, 4), "tau": round(total.mean_acceptance_length, 3),
                    "c": round(c, 4), "verify_width": round(width, 4),
                    "theorem_3_8": round(speedup(alpha, gamma, c), 3),
                    "with_measured_width": round(speedup(alpha, gamma, c, width), 3),
                    "with_measured_tau": round(
                        total.mean_acceptance_length / (gamma * c + width), 3
                    ),
                }  # fmt: skip
        return result

    def slots(self) -> dict[str, Any]:
        """All slots at once: tokens a second of all texts, and the host's share of a round."""
        result = {}
        for gamma in (0, self._middle):
            for _ in range(2):  # the first is the warm-up
                options = Options(
                    max_new_tokens=min(self.scale.tokens, self.room), gamma=gamma, ignore_eos=True
                )
                begin = time.perf_counter()
                texts = [
                    text
                    for _, text in self.engine.batch((p, options) for p in self.prompts[:SLOTS])
                ]
                seconds = time.perf_counter() - begin
            first = texts[0].stats  # while it ran, the others mostly did too
            device = first.time_draft + first.time_verify
            result[f"gamma {gamma}"] = {
                "slots": SLOTS,
                "tokens_per_second": round(sum(len(t.tokens) for t in texts) / seconds, 2),
                "wall_ms": _ms(first.time_rounds / first.rounds),
                "host_share": round(1 - device / first.time_rounds, 4),
            }
        return result

    def memory(self) -> dict[str, Any]:
        """Bytes of the GPU that are gone since before `load`, against the plan. Libraries' own code
        and CUDA graphs are in the one and not in the other."""
        plan = self.engine.memory
        result: dict[str, Any] = {"plan": plan, "planned": sum(plan.values())}
        if not self.gpu:
            return {**result, "used": None, "reason": "no GPU"}
        gc.collect()
        used = {"loaded": self._before - self._loaded, "after_rounds": self._before - self._free()}
        ratios = {name: round(u / sum(plan.values()), 4) for name, u in used.items()}
        return {**result, "used": used, "ratio": ratios}

    def transformers(self) -> dict[str, Any]:
        """`generate` on the same device, plain and assisted, against whole calls of ours."""
        gamma, tokens = self._middle, min(self.scale.peer_tokens, self.room)
        result: dict[str, Any] = {"new_tokens": tokens, "attention": "sdpa", "dtype": DTYPE}
        texts: dict[str, list[int]] = {}

        def measure(calls: dict[str, Callable[[], list[int]]]) -> None:
            for name, call in calls.items():
                texts[name] = call()
                seconds = statistics.median(_seconds(call) for _ in range(3))
                rate = round(tokens / seconds, 2)
                result[name] = {"seconds": round(seconds, 4), "tokens_per_second": rate}

        names = "outrider plain", f"outrider gamma {gamma}"
        measure(
            {
                names[0]: lambda: self.generate(self.engine, 1, 0, tokens=tokens)[1],
                names[1]: lambda: self.generate(self.engine, 1, gamma, tokens=tokens)[1],
            }
        )
        measure(_peers(self.built, self.device, self.prompts[1], tokens, gamma))
        plain, fast = (result[name]["seconds"] for name in names)
        for name, text in texts.items():
            agree = [a == b for a, b in zip(text, texts[names[0]], strict=True)]
            result[name] |= {
                "of_outrider_plain": round(result[name]["seconds"] / plain, 3),
                "of_outrider_speculative": round(result[name]["seconds"] / fast, 3),
                "same_first_tokens": [*agree, False].index(False),
            }
        return result


def _peers(
    built: Built, device: str, prompt: list[int], tokens: int, gamma: int
) -> dict[str, Callable[[], list[int]]]:
    """Transformers' own `generate`: plain, with an assistant as it sets that up, and with one that
    always drafts gamma tokens."""
    import torch
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()

    def model(folder: str) -> Any:
        loader = library.AutoModelForCausalLM
        made = loader.from_pretrained(
            folder, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
        )
        made.generation_config.eos_token_id = None  # so that every text has all its tokens
        return made.to(device).eval()

    target, draft = model(built.target), model(built.draft)
    ids = torch.tensor([prompt], device=device)

    def call(**more: Any) -> list[int]:
        with torch.inference_mode():
            text = target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                min_new_tokens=tokens, **more,
            )  # fmt: skip
        if device != "cpu":
            torch.cuda.synchronize()
        answer: list[int] = text[0, len(prompt) :].tolist()
        return answer

    own = draft.generation_config
    given = own.num_assistant_tokens, own.num_assistant_tokens_schedule
    threshold = own.assistant_confidence_threshold

    def assisted(constant: bool) -> list[int]:
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = (
            (gamma, "constant") if constant else given
        )
        own.assistant_confidence_threshold = 0.0 if constant else threshold
        return call(assistant_model=draft)

    return {
        "transformers": call,
        "transformers, assistant_model": lambda: assisted(False),
        f"transformers, assistant_model, gamma {gamma}": lambda: assisted(True),
    }


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


SECTIONS = ("copy", "of_rounds", "speedup", "memory", "slots", "without_graphs", "transformers")


def times(
    built: Built,
    device: str,
    scale: Scale = Scale(),
    save: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """All sections. One that breaks is named in "failed" and takes no other along."""
    run = Times(built, device, scale)
    report: dict[str, Any] = {
        "pair": built.name, "device": device, "load_s": run.load_s, "build_s": built.seconds,
        "weights_read": run.read, "failed": [],
    }  # fmt: skip
    for name in SECTIONS:
        begin = time.perf_counter()
        try:
            result: dict[str, Any] = getattr(run, name)()
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest is worth having
            traceback.print_exc()
            result = {"reason": first_line(error)}
            report["failed"].append(name)
        for line in _lines(result):
            print(f"{name}: {line}", flush=True)
        report[name] = {**result, "section_s": round(time.perf_counter() - begin, 1)}
        report["goals"] = goals(report)
        save(report)
    print(f"goals: {json.dumps(report['goals'])}", flush=True)
    return report


def goals(report: dict[str, Any]) -> dict[str, Any]:
    """What was measured of what a GPU is to reach, its limit, and whether it is met: at most 5% of
    a round is the host's, and memory is within 10% of the plan."""
    found = {}
    rows = [row for row in report.get("of_rounds", {}).values() if isinstance(row, dict)]
    if rows and report["device"] != "cpu":
        found["host_share"] = max(row["host_share"] for row in rows), 0.05
    if ratio := report.get("memory", {}).get("ratio"):
        found["memory_over_plan"] = abs(ratio["after_rounds"] - 1), 0.1
    return {
        name: {"value": round(value, 4), "limit": limit, "met": value <= limit}
        for name, (value, limit) in found.items()
    }


def _lines(result: dict[str, Any]) -> Iterator[str]:
    flat = {k: v for k, v in result.items() if not isinstance(v, dict)}
    yield from (f"{k} {json.dumps(v)}" for k, v in result.items() if isinstance(v, dict))
    if flat:
        yield json.dumps(flat)
