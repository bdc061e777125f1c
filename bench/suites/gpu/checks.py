"""Is what a bundle says on this device what it ought to say? Checks, each by itself.

Near-ties. The bundles compute in bfloat16, the reference in float32 with the same weights, and a
verification rounds otherwise than a step. Logits between 8 and 16, the bundled target's largest,
are 2^-4 apart in bfloat16. Of two, each may be off by two such steps: one from its own rounding,
one from all roundings before. So where two tokens' logits differ by less than `TOLERANCE`, either
may be the larger. (On the CPU the largest such margin of 1,280 tokens was 0.05, and 7 of them were
near-ties at all.) At most `FRACTION` of a text's tokens may be.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from runtime import Options, TextEngine, load
from runtime.certificate import check as certify
from runtime.files.errors import first_line

from ...core.prompts import PROMPTS
from ...core.record import recording
from .build import BuiltPair

TOLERANCE = 4 * 2**-4  # logits
FRACTION = 0.05
BEYOND = 150  # tokens of a long prompt behind its first prefill call
LOOK = 64  # most probable tokens of which the reference says how probable they are


@dataclass(frozen=True)
class CheckSize:
    """tokens: of a text. rounds: with draft = target. gammas: of graphs against direct calls."""

    tokens: int
    rounds: int
    gammas: tuple[int, ...]


FULL = CheckSize(160, 500, tuple(range(9)))
QUICK = CheckSize(24, 20, (0, 3))


@dataclass(frozen=True)
class Tie:
    """A token that the reference would not have said; margin: logits by which its own is ahead."""

    position: int
    token: int
    best: int
    margin: float

    def json_object(self) -> dict[str, Any]:
        return {**asdict(self), "margin": _number(self.margin)}


def follow(reference: TextEngine, prompt: Sequence[int], text: Sequence[int]) -> list[Tie]:
    """Hold every token of a text against the reference's choice after what comes before it."""
    found: list[Tie] = []
    start = 0
    while start < len(text) and len(found) <= max(4, FRACTION * len(text)):
        own = reference.generate(
            [*prompt, *text[:start]], max_new_tokens=len(text) - start, gamma=0, ignore_eos=True,
            logprobs=LOOK,
        )  # fmt: skip
        for i, token in enumerate(own.tokens, start):
            if token.id != text[i]:
                assert token.logprob is not None
                margin = token.logprob - dict(token.alternatives).get(text[i], -math.inf)
                found.append(Tie(i, text[i], token.id, round(margin, 4)))
                start = i + 1
                break
        else:
            break
    return found


def judged(ties: list[Tie], tokens: int) -> dict[str, Any]:
    """Near-ties are allowed, few of them."""
    margins = sorted((tie.margin for tie in ties), reverse=True)
    near = sum(margin <= TOLERANCE for margin in margins)
    return {
        "passed": near == len(ties) <= max(1, FRACTION * tokens),
        "tokens": tokens,
        "near_ties": near,
        "largest_margin": _number(margins[0] if margins else 0.0),
        "worst": [t.json_object() for t in sorted(ties, key=lambda t: -t.margin)[:4]],
    }


def _number(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None  # JSON has no infinity


class Checks:
    """The bundles of a folder on a device. Each method is a check and returns {"passed": ...}."""

    def __init__(self, built: BuiltPair, device: str, size: CheckSize):
        self.built, self.device, self.size = built, device, size
        self.engine = load(built.bundle, device=device, verify=False)
        self.prompts = [self.engine.tokenizer.encode(text) for text in PROMPTS]
        self._drafted: dict[str, Any] = {
            "max_new_tokens": size.tokens, "gamma": 4, "ignore_eos": True,
        }  # fmt: skip

    @cached_property
    def reference(self) -> TextEngine:
        if self.built.reference is None:
            raise RuntimeError(f"no reference was built: {self.built.failures}")
        return load(self.built.reference, device="cpu")

    def texts(self) -> dict[str, Any]:
        """Temperature 0 against the CPU in float32. With log-probabilities rounds are not launched
        ahead, which must change no token; and they say how far the two computations are apart."""
        ties: list[Tie] = []
        tokens, rounding, same = 0, 0.0, True
        for prompt in self.prompts:
            text = self.engine.generate(prompt, **self._drafted).token_ids
            told = self.engine.generate(prompt, **self._drafted, logprobs=0)
            same &= told.token_ids == text
            own = self.reference.generate(prompt, **{**self._drafted, "gamma": 0, "logprobs": 0})
            for mine, theirs in zip(told.tokens, own.tokens, strict=True):
                if mine.id != theirs.id:
                    break
                assert mine.logprob is not None and theirs.logprob is not None
                rounding = max(rounding, abs(mine.logprob - theirs.logprob))
            ties += follow(self.reference, prompt, text)
            tokens += len(text)
        result = judged(ties, tokens)
        result["passed"] &= same
        return {**result, "logprobs_differ_by": round(rounding, 4), "same_without_ahead": same}

    def certificates(self) -> dict[str, Any]:
        """At temperature 0 and 1, of the token and the block rule."""
        result: dict[str, Any] = {"passed": True}
        of_rules: dict[str, dict[str, Any]] = {
            "temperature 0": {"temperature": 0.0},
            "temperature 1": {"temperature": 1.0, "seed": 1000},
            "temperature 0.8, top_p 0.9, block": {
                "temperature": 0.8, "top_p": 0.9, "verify": "block", "seed": 2000,
            },
        }  # fmt: skip
        for name, options in of_rules.items():
            certificate = certify(self.engine, PROMPTS[0], Options(**self._drafted, **options))
            print("\n".join(certificate.lines()), flush=True)
            result[name] = certificate.json_object()
            result["passed"] &= certificate.passed
        return result

    def draft_is_target(self) -> dict[str, Any]:
        """Whatever is rejected was a near-tie; the margin is that of a prefill of the same text."""
        if self.built.same is None:
            raise RuntimeError("no bundle with draft = target was built")
        engine = load(self.built.same, device=self.device, verify=False)
        ties: list[Tie] = []
        count = drafted = accepted = 0
        while count < self.size.rounds:
            for prompt in self.prompts:
                room = engine.manifest.pair.max_len - len(prompt)
                wanted = max(8, min(5 * self.size.rounds // len(PROMPTS), room))
                with recording(engine) as recorder:
                    options = {**self._drafted, "max_new_tokens": wanted}
                    ids = engine.generate(prompt, **options).token_ids
                (text,) = recorder.take()
                count, drafted = count + text.stats.rounds, drafted + text.stats.drafted
                accepted += text.stats.accepted
                at = 1  # the prefill gave the first token
                for x in text.rounds:
                    if x.accepted < x.gamma:
                        before = [*prompt, *ids[: at + x.accepted]]
                        ties.append(
                            _rejected(engine, before, at + x.accepted, x.drafts[x.accepted])
                        )
                    at += x.accepted + 1
        return {
            **judged(ties, drafted), "rounds": count, "drafted": drafted, "accepted": accepted,
            "acceptance": round(accepted / max(1, drafted), 5),
        }  # fmt: skip

    def graphs(self) -> dict[str, Any]:
        """Replayed graphs and calls launched one by one say the same, in one slot and in two."""
        if self.device == "cpu":
            return {"passed": None, "reason": "no GPU"}
        return self.agree({"graphs": True}, {"graphs": False})

    def loop(self) -> dict[str, Any]:
        """Texts of one launch and of a launch a round say the same, and the time of their rounds.
        Not among `NAMES`: a loop that does not end would take what comes after it along."""
        if self.device == "cpu":
            return {"passed": None, "reason": "no GPU"}
        result = self.agree({"loop": False}, {"loop": True})
        for loop in (False, True):
            engine = load(self.built.bundle, device=self.device, loop=loop, verify=False)
            for _ in range(2):  # the first is the warm-up
                stats = engine.generate(self.prompts[0], **self._drafted).stats
            times = {"wall": stats.time_rounds, "device": stats.time_draft + stats.time_verify}
            result["loop" if loop else "round by round"] = {
                f"{name}_ms": round(1e3 * value / stats.rounds, 4) for name, value in times.items()
            }
        return result

    def agree(self, *ways: dict[str, Any]) -> dict[str, Any]:
        """Whether two ways of loading the bundle say the same."""
        gamma = max(self.size.gammas)
        options: list[dict[str, Any]] = [
            *({"gamma": g, "temperature": t, "seed": 7 + g}
              for g in self.size.gammas for t in (0.0, 1.0)),
            {"gamma": gamma, "temperature": 0.8, "seed": 3, "top_p": 0.9, "min_p": 0.05},
            {"gamma": gamma, "temperature": 0.8, "seed": 4, "verify": "block"},
            {"gamma": gamma, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3},
        ]  # fmt: skip
        limits: dict[str, Any] = {"max_new_tokens": min(48, self.size.tokens), "ignore_eos": True}
        said: list[list[list[int]]] = []
        for way in ways:
            engine = load(self.built.bundle, device=self.device, slots=2, verify=False, **way)
            alone = [engine.generate(self.prompts[0], **limits, **o).token_ids for o in options]
            requests = [
                (self.prompts[i % len(self.prompts)], Options(**limits, **o))
                for i, o in enumerate(options)
            ]
            together = dict(engine.batch(requests))
            said.append([*alone, *(together[i].token_ids for i in range(len(options)))])
        differ = [
            {"slots": 1 + i // len(options), **options[i % len(options)],
             "position": next(j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)}
            for i, (a, b) in enumerate(zip(*said, strict=True))
            if a != b
        ]  # fmt: skip
        return {"passed": not differ, "texts": len(said[0]), "differ": differ}

    def long_prompt(self) -> dict[str, Any]:
        """A prompt of two prefill calls."""
        chunk: int = self.engine.decoder.target.chunk  # type: ignore[attr-defined]
        length, tokens = chunk + BEYOND, min(32, self.size.tokens)
        if length + tokens > (most := self.engine.manifest.pair.max_len):
            return {"passed": None, "reason": f"{length} tokens are over the bundle's {most}"}
        together = [token for prompt in self.prompts for token in prompt]
        prompt = (together * (1 + length // len(together)))[:length]
        options = {**self._drafted, "max_new_tokens": tokens}
        text = self.engine.generate(prompt, **options).token_ids
        ties = follow(self.reference, prompt, text)
        return {**judged(ties, len(text)), "prompt_tokens": length}


def _rejected(engine: TextEngine, before: list[int], position: int, draft: int) -> Tie:
    """How far the draft's token was from the target's choice after `before`."""
    row = engine.generate(before, max_new_tokens=1, gamma=0, ignore_eos=True, logprobs=LOOK)
    best, logprob = row.tokens[0].alternatives[0]
    margin = logprob - dict(row.tokens[0].alternatives).get(draft, -math.inf)
    return Tie(position, draft, best, round(margin, 4))


NAMES = ("texts", "draft_is_target", "certificates", "graphs", "long_prompt")


def check(
    built: BuiltPair,
    device: str,
    size: CheckSize = FULL,
    save: Callable[[dict[str, Any]], object] = lambda report: None,
    only: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """These checks, and "passed". One that breaks has failed and takes no other along."""
    report: dict[str, Any] = {"pair": built.name, "device": device, "tolerance": TOLERANCE}
    checks = Checks(built, device, size)
    for name in only:
        begin = time.perf_counter()
        try:
            result: dict[str, Any] = getattr(checks, name)()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks are worth having
            traceback.print_exc()
            result = {"passed": False, "reason": first_line(error)}
        result["seconds"] = round(time.perf_counter() - begin, 1)
        report[name] = result
        word = {True: "passed", False: "FAILED", None: "skipped"}[result["passed"]]
        few = {k: v for k, v in result.items() if k != "passed" and not isinstance(v, dict)}
        print(f"{name}: {word} | {few}", flush=True)
        report["passed"] = all(report[n]["passed"] is not False for n in only if n in report)
        save(report)
    return report
