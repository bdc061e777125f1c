"""Checks of a bundle's output on a device. Each check is independent of the others.

Near-ties. The bundles compute in bfloat16, the reference in float32 with the same weights, and a
verification rounds differently from a step. Logits between 8 and 16, the bundled target's largest,
are 2^-4 apart in bfloat16. Each of two logits may be off by two such steps: one from its own
rounding, one from all roundings before. So if the logits of two tokens differ by less than
`TOLERANCE`, either may be the larger. (On the CPU, 7 of 1,280 tokens were near-ties, with a largest
margin of 0.05.) At most `MAX_TIE_SHARE` of a text's tokens may be near-ties.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from runtime import Options, TextEngine, load
from runtime.certificate import check as certify

from ...core.prompts import PROMPTS
from .constructed import free_gpu_memory
from .suite import NO_GPU

TOLERANCE = 4 * 2**-4  # logits
MAX_TIE_SHARE = 0.05
EXTRA_TOKENS = 150  # tokens of a long prompt after its first prefill call
TOP_LOGPROBS = 64  # number of most probable tokens that the reference reports
MAX_MARGIN = 99.0  # the margin of a token that is not among them
TEXTS = 3  # decoded with a loop; the first is the warm-up
MAX_ALPHA_DIFFERENCE = 0.1  # with twice 450 drafts: three standard errors if all were independent
Tie = dict[str, Any]  # token that differs from the reference's; margin: difference of their logits


class Checks:
    """The bundle of a folder on a device. Each method in `NAMES` is a check and returns {"passed":
    ...}, with None if the device cannot decide it."""

    # Without "loop", because a loop that does not end would prevent all later checks.
    NAMES = ("texts", "acceptance", "certificates", "graphs", "long_prompt")

    def __init__(self, folder: Path, device: str, quick: bool):
        self.folder, self.device = folder, device
        if device != "cpu":  # partial sums in bfloat16 would exceed `TOLERANCE`
            import torch

            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.tokens = 24 if quick else 160
        self.gammas = (0, 3) if quick else tuple(range(9))
        self.engine = load(folder / "bundle", device=device, verify=False)
        self.prompts = [self.engine.tokenizer.encode(text) for text in PROMPTS]
        self.draft_options: dict[str, Any] = {
            "max_new_tokens": self.tokens, "gamma": 4, "ignore_eos": True,
        }  # fmt: skip

    @cached_property
    def reference(self) -> TextEngine:
        return load(self.folder / "reference", device="cpu")

    def texts(self) -> dict[str, Any]:
        """Compare texts at temperature 0 with the CPU in float32. With log-probabilities, rounds
        are not launched ahead; this must not change any token."""
        ties: list[Tie] = []
        same = True
        for prompt in self.prompts:
            text = self.engine.generate(prompt, **self.draft_options).token_ids
            same &= text == self.engine.generate(prompt, **self.draft_options, logprobs=0).token_ids
            ties += find_ties(self.reference, prompt, text)
        result = judge_ties(ties, len(self.prompts) * self.tokens)
        return {**result, "passed": result["passed"] and same, "same_without_ahead": same}

    def acceptance(self) -> dict[str, Any]:
        """Check that drafts are accepted as often as on the CPU. This is the only check that shows
        errors in the draft's cache, because the text is always the target's."""
        alphas = []
        for engine in (self.engine, self.reference):
            texts = [engine.generate(prompt, **self.draft_options).stats for prompt in self.prompts]
            examined = sum(stats.examined for stats in texts)
            alphas.append(sum(stats.accepted for stats in texts) / examined)
        passed = abs(alphas[0] - alphas[1]) <= MAX_ALPHA_DIFFERENCE
        return {"passed": passed, "alpha": round(alphas[0], 4), "on_the_cpu": round(alphas[1], 4)}

    def certificates(self) -> dict[str, Any]:
        """Certify the output at temperature 0 and above, with the token and the block rule."""
        certificates = {}
        rules: dict[str, dict[str, Any]] = {
            "temperature 0": {"temperature": 0.0},
            "temperature 1": {"temperature": 1.0, "seed": 1000},
            "block": {"temperature": 0.8, "top_p": 0.9, "verify": "block", "seed": 2000},
        }
        for name, options in rules.items():
            whole = Options(**{**self.draft_options, **options})
            certificate = certify(self.engine, PROMPTS[0], whole).json_object()
            for kind in ("near_ties", "violations"):  # hundreds would flood the end of the log
                certificate[kind] = {"all": len(certificate[kind]), "first": certificate[kind][:4]}
            certificates[name] = certificate
        return {"passed": all(each["passed"] for each in certificates.values()), **certificates}

    def graphs(self) -> dict[str, Any]:
        """Check that replayed graphs and calls launched one by one give the same tokens, in one
        slot and in two."""
        return NO_GPU if self.device == "cpu" else self.compare({"graphs": True}, {"graphs": False})

    def loop(self) -> dict[str, Any]:
        """Check that a text launched as one loop and a text launched round by round have the same
        tokens; and time their rounds."""
        if self.device == "cpu":
            return NO_GPU
        # Differences in two slots are reported, but do not fail the check: when a request joins,
        # leaves or has another gamma, the GPU is rounds ahead in a graph with other widths, whose
        # matrix products round differently.
        result = self.compare({"loop": False}, {"loop": True}, same_graphs=False)
        timed = compare_loop(
            lambda loop: load(self.folder / "bundle", device=self.device, loop=loop, verify=False),
            self.draft_options, self.prompts[0],
        )  # fmt: skip
        return {**timed, **result, "passed": result["passed"] and timed["passed"] is not False}

    def compare(self, *ways: dict[str, Any], same_graphs: bool = True) -> dict[str, Any]:
        """Check that two ways of loading the bundle give the same tokens. same_graphs: both run the
        same graphs in each round; otherwise only texts in a single slot count, without their last
        rounds."""
        gamma = max(self.gammas)
        options: list[dict[str, Any]] = [
            *({"gamma": g, "temperature": t, "seed": 7 + g}
              for g in self.gammas for t in (0.0, 1.0)),
            {"gamma": gamma, "temperature": 0.8, "seed": 3, "top_p": 0.9, "min_p": 0.05},
            {"gamma": gamma, "temperature": 0.8, "seed": 4, "verify": "block"},
            {"gamma": gamma, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3},
        ]  # fmt: skip
        limits: dict[str, Any] = {"max_new_tokens": min(48, self.tokens), "ignore_eos": True}
        texts: list[list[list[int]]] = []
        for way in ways:
            engine = load(self.folder / "bundle", device=self.device, slots=2, verify=False, **way)
            alone = [engine.generate(self.prompts[0], **limits, **o).token_ids for o in options]
            together = dict(engine.batch(
                (self.prompts[i % len(self.prompts)], Options(**limits, **o))
                for i, o in enumerate(options)
            ))  # fmt: skip
            texts.append([*alone, *(together[i].token_ids for i in range(len(options)))])
        differ = [
            {"slots": 1 + i // len(options), **options[i % len(options)],
             "position": next(j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)}
            for i, (a, b) in enumerate(zip(*texts, strict=True))
            if a != b
        ]  # fmt: skip
        end = limits["max_new_tokens"] - gamma - 1
        counted = [x for x in differ if same_graphs or (x["slots"] == 1 and x["position"] < end)]
        return {"passed": not counted, "texts": len(texts[0]), "differ": differ}

    def long_prompt(self) -> dict[str, Any]:
        """Check a prompt that needs two prefill calls."""
        chunk: int = self.engine.decoder.target.chunk  # type: ignore[attr-defined]
        length, tokens = chunk + EXTRA_TOKENS, min(32, self.tokens)
        if length + tokens > (max_len := self.engine.manifest.pair.max_len):
            return {"passed": None, "reason": f"{length} tokens exceed the bundle's {max_len}"}
        together = [token for prompt in self.prompts for token in prompt]
        prompt = (together * (1 + length // len(together)))[:length]
        options = {**self.draft_options, "max_new_tokens": tokens}
        text = self.engine.generate(prompt, **options).token_ids
        ties = find_ties(self.reference, prompt, text)
        return {**judge_ties(ties, tokens), "prompt_tokens": length}


def find_ties(reference: TextEngine, prompt: Sequence[int], text: Sequence[int]) -> list[Tie]:
    """Compare every token of a text with the reference's choice after the preceding tokens."""
    ties: list[Tie] = []
    done = 0
    while done < len(text) and len(ties) <= max(4, MAX_TIE_SHARE * len(text)):
        own = reference.generate(
            [*prompt, *text[:done]], max_new_tokens=len(text) - done, gamma=0, ignore_eos=True,
            logprobs=TOP_LOGPROBS,
        )  # fmt: skip
        for best in own.tokens:
            token, done = text[done], done + 1
            if best.id != token:
                likely = dict(best.alternatives)
                margin = (
                    round(likely[best.id] - likely[token], 4) if token in likely else MAX_MARGIN
                )
                tie = {"position": done - 1, "token": token, "best": best.id, "margin": margin}
                ties.append(tie)
                break
    return ties


def judge_ties(ties: list[Tie], tokens: int) -> dict[str, Any]:
    """The verdict: a few near-ties are allowed."""
    worst = sorted(ties, key=lambda x: -x["margin"])
    near = sum(x["margin"] <= TOLERANCE for x in ties)
    return {
        "passed": near == len(ties) <= max(1, MAX_TIE_SHARE * tokens),
        "tokens": tokens, "near_ties": near, "worst": worst[:4],
    }  # fmt: skip


def compare_loop(
    load_engine: Callable[..., TextEngine], options: dict[str, Any], prompt: Sequence[int]
) -> dict[str, Any]:
    """Compare a whole text as one launch with rounds that are launched ahead: tokens and time.
    load_engine: loads the engine, with the argument `loop`. If the driver refuses the loop, the
    check does not fail: the reason is reported, with the time of rounds launched ahead only."""
    result: dict[str, Any] = {}
    texts: list[list[int]] = []
    for loop, name in ((False, "launched ahead"), (True, "loop")):
        with collect_warnings() as messages:
            engine = load_engine(loop=loop)
            for _ in range(TEXTS):
                text = engine.generate(prompt, **options)
        if refused := next((line for line in messages if "without a CUDA loop" in line), None):
            result["refused"] = refused
            break
        texts.append(text.token_ids)
        stats = text.stats
        device = stats.time_draft + stats.time_verify
        result[name] = {
            "wall_ms": round(1e3 * stats.time_rounds / stats.rounds, 4),
            "device_ms": round(1e3 * device / stats.rounds, 4),
            "host_share": round(1 - device / stats.time_rounds, 4),
        }
        del engine, text, stats
        free_gpu_memory()  # before the next engine takes as much memory
    same = len(texts) == 2 and texts[0] == texts[1]
    return {"passed": None if "refused" in result else same, **result}


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect the runtime's warnings within the block."""
    found: list[str] = []
    logger, handler = logging.getLogger("outrider"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
