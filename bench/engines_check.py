"""Is what a bundle says on this device what it ought to say? Five checks, each by itself.

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
from typing import Any

from runtime import Options, TextEngine, load
from runtime.certificate import check as certify
from runtime.files.errors import first_line

from .engines_build import Built
from .pair import PROMPTS

TOLERANCE = 4 * 2**-4  # logits
FRACTION = 0.05
LOOK = 64  # most probable tokens of which the reference says how probable they are
ROUNDS = 500  # with draft = target


@dataclass(frozen=True)
class Scale:
    """How much is checked. tokens: of a text. gammas: of graphs against direct calls."""

    tokens: int = 160
    rounds: int = ROUNDS
    gammas: tuple[int, ...] = tuple(range(9))


QUICK = Scale(24, 20, (0, 3))


@dataclass(frozen=True)
class Tie:
    """A token that the reference would not have said; margin: logits by which its own is ahead."""

    position: int
    token: int
    best: int
    margin: float


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
    margins = [tie.margin for tie in ties]
    return {
        "passed": all(m <= TOLERANCE for m in margins) and len(ties) <= max(1, FRACTION * tokens),
        "tokens": tokens,
        "near_ties": sum(m <= TOLERANCE for m in margins),
        "largest_margin": _number(max(margins, default=0.0)),
        "worst": [
            {**asdict(t), "margin": _number(t.margin)}
            for t in sorted(ties, key=lambda t: -t.margin)[:4]
        ],
    }


def _number(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None  # JSON has no infinity


class Checks:
    """The bundles of a folder on a device. Each method is a check and returns {"passed": ...}."""

    def __init__(self, built: Built, device: str, scale: Scale):
        self.built, self.device, self.scale = built, device, scale
        self.engine = load(built.bundle, device=device, verify=False)
        self._reference: TextEngine | None = None

    @property
    def reference(self) -> TextEngine:
        if self._reference is None:
            if self.built.reference is None:
                raise RuntimeError(f"no reference was built: {self.built.failures}")
            self._reference = load(self.built.reference, device="cpu")
        return self._reference

    def prompts(self) -> list[list[int]]:
        return [self.engine.tokenizer.encode(text) for text in PROMPTS]

    def texts(self) -> dict[str, Any]:
        """Temperature 0 against the CPU in float32. With log-probabilities rounds are not launched
        ahead, which must change no token; and they say how far the two computations are apart."""
        ties: list[Tie] = []
        tokens, rounding, same = 0, 0.0, True
        for prompt in self.prompts():
            options = {"max_new_tokens": self.scale.tokens, "gamma": 4, "ignore_eos": True}
            text = self.engine.generate(prompt, **options).token_ids
            told = self.engine.generate(prompt, **options, logprobs=0)
            same &= told.token_ids == text
            own = self.reference.generate(prompt, **{**options, "gamma": 0, "logprobs": 0})
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
        for name, options in {
            "temperature 0": Options(temperature=0.0),
            "temperature 1": Options(temperature=1.0, seed=1000),
            "temperature 0.8, top_p 0.9, block": Options(
                temperature=0.8, top_p=0.9, verify="block", seed=2000
            ),
        }.items():
            limits = {"max_new_tokens": self.scale.tokens, "gamma": 4, "ignore_eos": True}
            given = Options(**{**vars(options), **limits})
            certificate = certify(self.engine, PROMPTS[0], given)
            print("\n".join(certificate.lines()), flush=True)
            result[name] = certificate.json_object()
            result["passed"] &= certificate.passed
        return result

    def draft_is_target(self) -> dict[str, Any]:
        """Whatever is rejected was a near-tie; the margin is that of a prefill of the same text."""
        if self.built.same is None:
            raise RuntimeError("no bundle with draft = target was built")
        engine = load(self.built.same, device=self.device, verify=False)
        rounds, seen = engine.decoder.rounds, []
        run = rounds.run

        def recorded(turns: Any) -> Any:
            outcome = run(turns)
            seen.extend(outcome.parts)
            return outcome

        rounds.run = recorded  # type: ignore[method-assign]
        ties: list[Tie] = []
        count = drafted = accepted = 0
        room = engine.manifest.pair.max_len
        while count < self.scale.rounds:
            for prompt in self.prompts():
                seen.clear()
                wanted = min(5 * self.scale.rounds // len(PROMPTS), room - len(prompt))
                options = {"max_new_tokens": max(8, wanted), "gamma": 4, "ignore_eos": True}
                result = engine.generate(prompt, **options)
                parts, stats = list(seen), result.stats
                count, drafted = count + stats.rounds, drafted + stats.drafted
                accepted += stats.accepted
                at = 1  # the prefill gave the first token
                for part in parts:
                    n = part.verdict.accepted
                    if n < len(part.drafts):
                        before = [*prompt, *result.token_ids[: at + n]]
                        ties.append(_rejected(engine, before, at + n, part.drafts[n]))
                    at += n + 1
        return {
            **judged(ties, drafted), "rounds": count, "drafted": drafted, "accepted": accepted,
            "acceptance": round(accepted / max(1, drafted), 5),
        }  # fmt: skip

    def graphs(self) -> dict[str, Any]:
        """Replayed graphs and calls launched one by one say the same, in one slot and in two."""
        return self._agree({"graphs": True}, {"graphs": False})

    def loop(self) -> dict[str, Any]:
        """Texts of one launch and of a launch a round say the same, and the time of their rounds.
        Not among `NAMES`: a loop that does not end would take what comes after it along."""
        if self.device == "cpu":
            return {"passed": None, "reason": "no GPU"}
        result = self._agree({"loop": False}, {"loop": True})
        for loop in (False, True):
            engine = load(self.built.bundle, device=self.device, loop=loop, verify=False)
            for _ in range(2):  # the first is the warm-up
                stats = engine.generate(
                    self.prompts()[0], max_new_tokens=self.scale.tokens, gamma=4, ignore_eos=True
                ).stats
            seconds = {
                "wall_ms": stats.time_rounds / stats.rounds,
                "device_ms": (stats.time_draft + stats.time_verify) / stats.rounds,
            }
            result["loop" if loop else "round by round"] = {
                name: round(1e3 * value, 4) for name, value in seconds.items()
            }
        return result

    def _agree(self, *ways: dict[str, Any]) -> dict[str, Any]:
        """Whether two ways of loading the bundle say the same."""
        options: list[dict[str, Any]] = [
            {"gamma": gamma, "temperature": temperature, "seed": 7 + gamma}
            for gamma in self.scale.gammas
            for temperature in (0.0, 1.0)
        ]
        gamma = max(self.scale.gammas)
        options += [
            {"gamma": gamma, "temperature": 0.8, "seed": 3, "top_p": 0.9, "min_p": 0.05},
            {"gamma": gamma, "temperature": 0.8, "seed": 4, "verify": "block"},
            {"gamma": gamma, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3},
        ]
        limits: dict[str, Any] = {"max_new_tokens": min(48, self.scale.tokens), "ignore_eos": True}
        prompts = self.prompts()
        said: list[list[list[int]]] = []
        for way in ways:
            engine = load(self.built.bundle, device=self.device, slots=2, verify=False, **way)
            alone = [engine.generate(prompts[0], **limits, **given).token_ids for given in options]
            together = dict(
                engine.batch(
                    (prompts[i % len(prompts)], Options(**limits, **given))
                    for i, given in enumerate(options)
                )
            )
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
        pair, chunk = self.engine.manifest.pair, self.engine.decoder.target.chunk  # type: ignore[attr-defined]
        length, tokens = chunk + 150, min(32, self.scale.tokens)
        if length + tokens > pair.max_len:
            reason = f"{length} tokens are over the bundle's {pair.max_len}"
            return {"passed": None, "reason": reason}
        together = [token for prompt in self.prompts() for token in prompt]
        prompt = (together * (1 + length // len(together)))[:length]
        text = self.engine.generate(prompt, max_new_tokens=tokens, gamma=4, ignore_eos=True)
        ties = follow(self.reference, prompt, text.token_ids)
        return {**judged(ties, len(text.token_ids)), "prompt_tokens": length}


def _rejected(engine: TextEngine, before: list[int], position: int, draft: int) -> Tie:
    """How far the draft's token was from the target's choice after `before`."""
    row = engine.generate(before, max_new_tokens=1, gamma=0, ignore_eos=True, logprobs=LOOK)
    best, logprob = row.tokens[0].alternatives[0]
    margin = logprob - dict(row.tokens[0].alternatives).get(draft, -math.inf)
    return Tie(position, draft, best, round(margin, 4))


NAMES = ("texts", "draft_is_target", "certificates", "graphs", "long_prompt")


def check(
    built: Built,
    device: str,
    scale: Scale = Scale(),
    save: Callable[[dict[str, Any]], object] = lambda report: None,
    only: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """These checks, and "passed". One that breaks has failed and takes no other along."""
    report: dict[str, Any] = {"pair": built.name, "device": device, "tolerance": TOLERANCE}
    checks = Checks(built, device, scale)
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
