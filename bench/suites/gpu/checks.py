"""Checks of a bundle's output on a device. Each check is independent of the others.

Near-ties. The bundles compute in bfloat16, the reference in float32 with the same weights, and a
verification rounds differently from a step. Logits between 8 and 16, the bundled target's largest,
are 2^-4 apart in bfloat16. Each of two logits may be off by two such steps: one from its own
rounding, one from all roundings before. So if the logits of two tokens differ by less than
`TOLERANCE`, either may be the larger. (On the CPU, 7 of 1,280 tokens were near-ties, with a largest
margin of 0.05.) At most `MAX_TIE_SHARE` of a text's tokens may be near-ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from runtime import Options, TextEngine, load
from runtime.certificate import check as certify

from ...core.prompts import PROMPTS
from .suite import NO_GPU

TOLERANCE = 4 * 2**-4  # logits
MAX_TIE_SHARE = 0.05
EXTRA_TOKENS = 150  # tokens of a long prompt after its first prefill call
TOP_LOGPROBS = 64  # number of most probable tokens that the reference reports
MAX_MARGIN = 99.0  # the margin of a token that is not among them
MAX_ALPHA_DIFFERENCE = 0.1  # with twice 450 drafts: three standard errors if all were independent
Tie = dict[str, Any]  # token that differs from the reference's; margin: difference of their logits


class Checks:
    """The bundle of a folder on a device. Each method in `NAMES` is a check and returns {"passed":
    ...}, with None if the device cannot decide it."""

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

    def compare(self, *ways: dict[str, Any]) -> dict[str, Any]:
        """Check that two ways of loading the bundle give the same tokens."""
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
        return {"passed": not differ, "texts": len(texts[0]), "differ": differ}

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
