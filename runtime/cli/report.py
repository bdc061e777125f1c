"""How a finished generation is reported: summary, detailed statistics, JSON, colours.

Pure functions from results to lines; `command.py` decides which of them are printed, and where.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

from ..gamma.costs import RoundCosts
from ..sequence import Token
from ..stats import Stats
from ..text.options import Options
from ..text.results import Result
from ..theory.formulas import speedup

# Figure 1 of Leviathan et al. 2023: green for what the target accepted, blue for its corrections.
# The third colour of the figure is for rejected drafts; here it is the bonus token's.
COLORS = {"accepted": 32, "corrected": 34, "bonus": 35}


def color(text: str, origin: str) -> str:
    """`text` in the colour of its token's origin; first and plain tokens have no colour."""
    code = COLORS.get(origin)
    return text if code is None or not text else f"\x1b[{code}m{text}\x1b[0m"


def legend() -> str:
    return " ".join(color(origin, origin) for origin in COLORS) + " (the others: target alone)"


def summary(result: Result, gamma: str, *, seed: bool = True) -> list[str]:
    """The summary of a request. gamma: as requested. seed: whether to print the seed."""
    stats = result.stats
    finish = result.finish_reason
    if result.stopped_by is not None:
        finish += ":" + json.dumps(result.stopped_by, ensure_ascii=False)
    drafts = f" | draft prefill {_ms(t)} ms" if (t := stats.time_draft_prefill) else ""
    return [
        f"{_source(stats)}prompt {stats.prompt_tokens} tok{_reused(stats)} "
        f"| TTFT {_ms(stats.ttft)} ms (target prefill {_ms(stats.time_prefill)}){drafts}",
        f"output {stats.output_tokens} tok | {stats.tokens_per_second:.1f} tok/s "
        f"| TPOT {_ms(stats.tpot)} ms | finish {finish}"
        + (f" | seed {result.seed}" if seed else ""),
        *round_lines(stats, gamma),
    ]


def answer(result: Result) -> str:
    """The summary of an answer in a conversation."""
    stats = result.stats
    return (
        f"prompt {stats.prompt_tokens} tok{_reused(stats)} | TTFT {_ms(stats.ttft)} ms | "
        f"output {stats.output_tokens} tok | {stats.tokens_per_second:.1f} tok/s"
    )


def batch_summary(results: Sequence[Result], seconds: float, gamma: str) -> list[str]:
    """The summary of a batch. seconds: wall time of the whole batch."""
    total = Stats.total(result.stats for result in results)
    reasons = [result.finish_reason for result in results]
    finish = " ".join(f"{reason} {reasons.count(reason)}" for reason in sorted(set(reasons)))
    throughput = total.output_tokens / seconds if seconds else 0.0
    return [
        f"requests {len(results)} | {_source(total)}prompts {total.prompt_tokens} tok"
        f"{_reused(total)} | finish {finish}",
        f"output {total.output_tokens} tok | {throughput:.1f} tok/s | {seconds:.1f} s",
        *round_lines(total, gamma),
    ]


def round_lines(stats: Stats, gamma: str) -> list[str]:
    """Rounds, both acceptance rates, and where the time of the rounds went."""
    if not stats.rounds:
        return []
    lines = [f"rounds {stats.rounds} | tau {stats.mean_acceptance_length:.2f} tok/round"]
    if stats.drafted:
        lines[0] += (
            f" | accepted {_rate(stats.accepted, stats.drafted, 'drafted')},"
            f" {_rate(stats.accepted, stats.examined, 'examined')}"
        )
        positions = " ".join(_fraction(rate) for rate in stats.acceptance_by_position)
        lines.append(f"accepted by position {positions} | gamma {gamma}")
    else:
        lines[0] += f" | {'plain decoding' if gamma == '0' else 'nothing drafted'} (gamma {gamma})"
    parts = _times(stats)
    whole = sum(parts.values())
    shares = " ".join(f"{name} {_percent(part, whole)}" for name, part in parts.items())
    lines.append(f"time {shares}")
    if stats.drafted and stats.time_draft and stats.time_verify:
        share = (stats.time_draft / stats.drafted) / (stats.time_verify / stats.rounds)
        lines[-1] += f" | a draft step takes {_percent(share, 1)} of a verification"
    return lines


def detailed(stats: Stats, costs: RoundCosts | None = None) -> list[str]:
    """Details of the rounds: acceptance at each draft position, the number of rounds by accepted
    drafts, milliseconds, theory.

    costs: the costs of rounds if a plain step was timed; the theorem's c is in plain steps.
    """
    lines = []
    at = stats.accepted_at
    if stats.drafted:
        for i, (accepted, drafted) in enumerate(zip(at, stats.drafted_at, strict=True)):
            # A position is examined if all drafts before it were accepted.
            examined = drafted if i == 0 else min(drafted, at[i - 1])
            lines.append(
                f"draft {i + 1}: accepted {_rate(accepted, drafted, 'drafted')}, "
                f"{_rate(accepted, examined, 'examined')}"
            )
        at_least = [stats.rounds, *at, 0]
        exactly = (f"{i}: {a - b}" for i, (a, b) in enumerate(pairwise(at_least)))
        lines.append("rounds by accepted drafts  " + "  ".join(exactly))
    times = {
        "target prefill": stats.time_prefill,
        "draft prefill": stats.time_draft_prefill,
        **_times(stats),
        "total": stats.elapsed,
    }
    lines.append("ms  " + "  ".join(f"{name} {_ms(value)}" for name, value in times.items()))
    if stats.drafted:
        lines.append(
            f"a draft step {_ms(stats.time_draft / stats.drafted)} ms, a verification "
            f"{_ms(stats.time_verify / stats.rounds)} ms"
        )
        if costs is not None:
            alpha, gamma, cost = stats.acceptance_rate, stats.drafted / stats.rounds, costs.draft
            lines[-1] += (
                f", a plain step {_ms(costs.plain)} ms | Theorem 3.8 at alpha {_fraction(alpha)}, "
                f"gamma {gamma:.1f}, c {_fraction(cost)}: {speedup(alpha, gamma, cost):.2f}x"
            )
    return lines


def _times(stats: Stats) -> dict[str, float]:
    """Seconds of the rounds, by part."""
    return {name: getattr(stats, f"time_{name}") for name in ("draft", "verify", "sample", "host")}


def baseline_object(result: Result, plain: Result, *, same: bool) -> dict[str, Any]:
    """The `baseline` object of --json. speedup: ratio of the tokens per second.

    same: whether the two texts should be equal; otherwise they are two independent draws.
    """
    plain_speed = plain.stats.tokens_per_second
    return {
        "tokens_per_second": round(plain_speed, 3),
        "output_tokens": plain.stats.output_tokens,
        "speedup": round(result.stats.tokens_per_second / plain_speed, 4) if plain_speed else None,
        **({"same_tokens": result.token_ids == plain.token_ids} if same else {}),
    }


def baseline(result: Result, plain: Result, *, same: bool) -> str:
    """The baseline line. same: see `baseline_object`."""
    speed, plain_speed = result.stats.tokens_per_second, plain.stats.tokens_per_second
    line = f"baseline {plain_speed:.1f} tok/s -> {speed / plain_speed if plain_speed else 0.0:.2f}x"
    if not same:
        return f"{line} | output {plain.stats.output_tokens} tok"
    if result.token_ids == plain.token_ids:
        return f"{line} | same tokens"
    pairs = zip(result.token_ids, plain.token_ids, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return f"{line} | different tokens from {alike} on (--check tests whether rounding explains it)"


def memory(parts: Mapping[str, int]) -> str:
    """The memory line, in one unit. parts: bytes of "target", "draft", "cache"; on a GPU also
    "activations" and "buffers"."""
    total = sum(parts.values())
    unit, size = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    names = ("target", "draft", "cache", "activations", "buffers")
    shown = {"KV" if name == "cache" else name: parts[name] for name in names if name in parts}
    items = (f"{name} {part / size:.1f}" for name, part in shown.items())
    return f"memory {total / size:.1f} {unit} = " + " + ".join(items)


def json_object(result: Result, *, logprobs: bool, **more: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of a request. more: `bits`, and `baseline` and `check` if requested."""
    body: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "seed": result.seed,
        "stats": result.stats.summary(),
    }
    if result.error is not None:
        body["error"] = {"kind": result.error.kind, "cause": result.error.cause}
    if logprobs:
        body["logprobs"] = [_logprob(token) for token in result.tokens]
    return {**body, **more}


def json_line(body: Mapping[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, allow_nan=False)


def _logprob(token: Token) -> dict[str, Any]:
    alternatives = [{"id": i, "logprob": _finite(value)} for i, value in token.alternatives]
    return {"id": token.id, "logprob": _finite(token.logprob), "alternatives": alternatives}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: the log-probability of an impossible token is null."""
    return None if value is None or not math.isfinite(value) else round(value, 6)


def _source(stats: Stats) -> str:
    return f"source {stats.source_tokens} tok | " if stats.source_tokens else ""


def _reused(stats: Stats) -> str:
    return f" ({stats.reused_tokens} reused)" if stats.reused_tokens else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3g}"


def _rate(part: int, whole: int, what: str) -> str:
    return f"{part}/{whole} {what} ({_percent(part, whole)})"


def _percent(part: float, whole: float) -> str:
    return f"{100 * _rounded(part / whole):.0f}%" if whole else "0%"


def _fraction(value: float) -> str:
    """Two decimals, without a zero before the point."""
    text = f"{_rounded(value):.2f}"
    return text[1:] if text.startswith("0") else text


def _rounded(share: float) -> float:
    """To hundredths, but not up to the whole."""
    return min(round(share, 2), 0.99) if share < 1 else round(share, 2)


def notes(all_options: Collection[Options]) -> Iterator[str]:
    """A note for each option in use that is not exact."""
    if any(options.verify == "sigmoid" for options in all_options):
        yield (
            "note: verify=sigmoid is not exact: the output is close to the draft's, and does not "
            "have the target's distribution"
        )
    lenience = min(options.lenience for options in all_options)
    if lenience < 1:
        yield (
            f"note: lenience={lenience:g} is not exact: a token may be drawn with up to "
            f"{1 / lenience:.3g} times the target's probability"
        )
