"""What a pair of engines brings on a GPU: ratios of one run beside what physics and theory allow.

Of a round: its wall time, and from the device's own clock the time of drafts and verification. What
the two do not share is the host's: gaps in which the GPU waits. A round has to read the draft's
weights gamma times, the target's once and the rows that the caches have; a copy measured in the
same run says how fast memory is.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Options, TextEngine, load
from runtime.files.errors import first_line
from runtime.stats import Stats
from runtime.theory.formulas import speedup

from ...core.clock import order
from ...core.costs import Traffic
from .build import DTYPE, BuiltPair

PROMPT = 64  # tokens
SLOTS = 4


@dataclass(frozen=True)
class TimesSize:
    """tokens: of a text. turns: texts of each gamma, in alternation."""

    tokens: int
    turns: int
    gammas: tuple[int, ...]
    peer_tokens: int

    @property
    def middle(self) -> int:
        return self.gammas[len(self.gammas) // 2]


FULL = TimesSize(160, 5, (2, 4, 8), 96)
QUICK = TimesSize(24, 2, (2,), 8)


def weight_bytes(checkpoint: Path, size: int) -> int:
    """What a step reads of `size` bytes of weights: of an untied embedding one row a token."""
    config = json.loads((checkpoint / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    return size - (0 if tied else 2 * int(config["vocab_size"]) * int(config["hidden_size"]))


class Times:
    """One run. Each method is a section; what it returns goes into the report under its name."""

    def __init__(self, built: BuiltPair, device: str, size: TimesSize):
        self.built, self.device, self.size = built, device, size
        self.gpu = device != "cpu"
        self.bandwidth: float | None = None
        before = self._free()
        begin = time.perf_counter()
        self.engine = load(built.bundle, device=device, slots=SLOTS, verify=False, reuse=False)
        self.load_s = round(time.perf_counter() - begin, 2)
        self._before, self._loaded = before, self._free()
        rng = np.random.default_rng(0)
        vocab_size, pair = self.engine.decoder.vocab_size, self.engine.manifest.pair
        self.prompts = [rng.integers(1, vocab_size, PROMPT).tolist() for _ in range(8)]
        self.room = pair.max_len - PROMPT
        assert pair.draft is not None
        self.read = {
            role: weight_bytes(Path(folder), self.engine.memory[role])
            for role, folder in (("target", built.target), ("draft", built.draft))
        }
        rows = (facts.cache_bytes(1) / pair.capacity for facts in (pair.target, pair.draft))
        self._rows = tuple(rows)

    def _free(self) -> int:
        if not self.gpu:
            return 0
        from runtime.backends.cuda import Cuda

        return Cuda(int(self.device.partition(":")[2] or 0)).memory()[0]

    def _options(self, gamma: int, tokens: int = 0, **more: Any) -> dict[str, Any]:
        tokens = min(tokens or self.size.tokens, self.room)
        return {"gamma": gamma, "max_new_tokens": tokens, "ignore_eos": True, **more}

    # Sections

    def copy(self) -> dict[str, Any]:
        if not self.gpu:
            return {"bytes_per_second": None, "reason": "no GPU"}
        import torch

        from . import kernel

        self.bandwidth = kernel.copy_bandwidth()
        torch.cuda.empty_cache()
        return {"bytes_per_second": round(self.bandwidth)}

    def rounds(self) -> dict[str, Any]:
        """Rounds of each gamma, and their speed over plain decoding's beside the theory."""
        at_1 = self._sweep(self.engine, 1.0, (0, self.size.middle))
        return self._sweep(self.engine, 0.0, (0, *self.size.gammas)) | at_1

    def without_graphs(self) -> dict[str, Any]:
        if not self.gpu:
            return {"rounds": None, "reason": "no GPU"}
        engine = load(self.built.bundle, device=self.device, graphs=False, verify=False)
        return self._sweep(engine, 0.0, (0, self.size.middle))

    def _sweep(
        self, engine: TextEngine, temperature: float, gammas: Sequence[int]
    ) -> dict[str, Any]:
        """Texts with each gamma, 0 first, in turn."""
        texts: dict[int, list[Stats]] = {gamma: [] for gamma in gammas}
        for turn in range(self.size.turns + 1):
            for gamma in order(gammas, turn):
                options = self._options(gamma, temperature=temperature, seed=turn)
                stats = engine.generate(self.prompts[turn % len(self.prompts)], **options).stats
                if turn:  # in the first graphs are captured
                    texts[gamma].append(stats)
        rows = {gamma: self._row(gamma, some) for gamma, some in texts.items()}
        step = rows[0]["draft_ms"] + rows[0]["verify_ms"]
        for gamma in gammas[1:]:
            row, pairs = rows[gamma], zip(texts[gamma], texts[0], strict=True)
            ratios = sorted(plain.tpot() / fast.tpot() for fast, plain in pairs)
            alpha, c = row["alpha"], row["draft_ms"] / gamma / step
            width = row["verify_ms"] / step
            theory = {
                "ratio": statistics.median(ratios), "ratio_low": ratios[0],
                "ratio_high": ratios[-1], "c": c, "verify_width": width,
                "theorem_3_8": speedup(alpha, gamma, c),
                "with_measured_width": speedup(alpha, gamma, c, width),
                "with_measured_tau": row["tau"] / (gamma * c + width),
            }  # fmt: skip
            row |= {name: round(value, 4) for name, value in theory.items()}
        return {f"temperature {temperature:g}, gamma {gamma}": rows[gamma] for gamma in gammas}

    def _row(self, gamma: int, texts: Sequence[Stats]) -> dict[str, Any]:
        total = Stats()
        for stats in texts:
            total.add(stats)
        device = total.time_draft + total.time_verify
        length = PROMPT + total.output_tokens / len(texts) / 2  # the mean
        traffic = Traffic(
            self.read["target"], self._rows[0], length, self.read["draft"], self._rows[1]
        )
        row: dict[str, Any] = {
            "rounds": total.rounds,
            "tokens_per_second": round(statistics.median(1 / s.tpot() for s in texts), 2),
            "wall_ms": _ms(total.time_rounds / total.rounds),
            "draft_ms": _ms(total.time_draft / total.rounds),
            "verify_ms": _ms(total.time_verify / total.rounds),
            "host_share": round(1 - device / total.time_rounds, 4),
            "tau": round(total.mean_acceptance_length, 3),
            "alpha": round(total.accepted / max(1, total.examined), 4),
            "bytes": round(traffic.of_round(gamma)),
        }
        row["bytes_per_second"] = round(row["bytes"] * total.rounds / device)
        if self.bandwidth:
            row["of_copy_bandwidth"] = round(row["bytes_per_second"] / self.bandwidth, 4)
        return row

    def slots(self) -> dict[str, Any]:
        """All slots at once: tokens a second of all texts, and the host's share of a round."""
        result = {}
        for gamma in (0, self.size.middle):
            for _ in range(2):  # the first is the warm-up
                options = Options(**self._options(gamma))
                begin = time.perf_counter()
                texts = dict(self.engine.batch((p, options) for p in self.prompts[:SLOTS]))
                seconds = time.perf_counter() - begin
            first = texts[0].stats  # while it ran, the others mostly did too
            device = first.time_draft + first.time_verify
            tokens = sum(len(text.tokens) for text in texts.values())
            result[f"gamma {gamma}"] = {
                "slots": SLOTS,
                "tokens_per_second": round(tokens / seconds, 2),
                "wall_ms": _ms(first.time_rounds / first.rounds),
                "host_share": round(1 - device / first.time_rounds, 4),
            }
        return result

    def memory(self) -> dict[str, Any]:
        """Bytes of the GPU that are gone since before `load`, against the plan. Libraries' own code
        and CUDA graphs are in the one and not in the other."""
        plan, planned = self.engine.memory, sum(self.engine.memory.values())
        if not self.gpu:
            return {"plan": plan, "planned": planned, "used": None, "reason": "no GPU"}
        gc.collect()
        used = {"loaded": self._before - self._loaded, "after_rounds": self._before - self._free()}
        ratios = {name: round(u / planned, 4) for name, u in used.items()}
        return {"plan": plan, "planned": planned, "used": used, "ratio": ratios}

    def transformers(self) -> dict[str, Any]:
        """`generate` on the same device, plain and assisted, against whole calls of ours."""
        gamma, tokens = self.size.middle, min(self.size.peer_tokens, self.room)
        prompt = self.prompts[1]

        def ours(gamma: int) -> Callable[[], list[int]]:
            options = self._options(gamma, tokens, temperature=0.0)
            return lambda: self.engine.generate(prompt, **options).token_ids

        names = "outrider plain", f"outrider gamma {gamma}"
        calls = {names[0]: ours(0), names[1]: ours(gamma)}
        calls |= _peers(self.built, self.device, prompt, tokens, gamma)
        texts, seconds = {}, {}
        for name, call in calls.items():
            texts[name] = call()
            seconds[name] = statistics.median(_seconds(call) for _ in range(3))
        result: dict[str, Any] = {"new_tokens": tokens, "attention": "sdpa", "dtype": DTYPE}
        for name, text in texts.items():
            agree = [a == b for a, b in zip(text, texts[names[0]], strict=True)]
            result[name] = {
                "tokens_per_second": round(tokens / seconds[name], 2),
                "of_outrider_plain": round(seconds[name] / seconds[names[0]], 3),
                "of_outrider_speculative": round(seconds[name] / seconds[names[1]], 3),
                "same_first_tokens": [*agree, False].index(False),
            }
        return result


def _peers(
    built: BuiltPair, device: str, prompt: list[int], tokens: int, gamma: int
) -> dict[str, Callable[[], list[int]]]:
    """Transformers' own `generate`: plain, with an assistant as it sets that up, and with one that
    always drafts gamma tokens."""
    import torch
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()

    def model(folder: str) -> Any:
        made = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, DTYPE), attn_implementation="sdpa"
        )
        made.generation_config.eos_token_id = None  # so that every text has all its tokens
        return made.to(device).eval()

    target, draft = model(built.target), model(built.draft)
    ids = torch.tensor([prompt], device=device)
    own = draft.generation_config
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule",
             "assistant_confidence_threshold")  # fmt: skip
    given = tuple(getattr(own, name) for name in names)

    def call(*drafting: Any) -> list[int]:
        """drafting: values of these names; none of them for no assistant."""
        for name, value in zip(names, drafting, strict=False):
            setattr(own, name, value)
        with torch.inference_mode():
            text = target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                min_new_tokens=tokens, assistant_model=draft if drafting else None,
            )  # fmt: skip
        if device != "cpu":
            torch.cuda.synchronize()
        answer: list[int] = text[0, len(prompt) :].tolist()
        return answer

    return {
        "transformers": call,
        "transformers, assistant_model": lambda: call(*given),
        f"transformers, assistant_model, gamma {gamma}": lambda: call(gamma, "constant", 0.0),
    }


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


SECTIONS = ("copy", "rounds", "memory", "slots", "without_graphs", "transformers")


def times(
    built: BuiltPair,
    device: str,
    size: TimesSize = FULL,
    save: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """All sections. One that breaks is named in "failed" and takes no other along."""
    run = Times(built, device, size)
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
    rows = [row for row in report.get("rounds", {}).values() if isinstance(row, dict)]
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
