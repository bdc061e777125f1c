"""The figures of the summary, from known counts and times."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from runtime.cli import report
from runtime.decoder import Token
from runtime.gamma.costs import RoundCosts
from runtime.stats import Stats
from runtime.text.results import Result


def make_stats():
    """74 rounds of gamma 5, as in the documentation's example."""
    return Stats(
        prompt_tokens=412, output_tokens=256, rounds=74, round_tokens=255, drafted=349,
        examined=237, accepted=182, drafted_at=[74, 70, 69, 68, 68],
        accepted_at=[58, 42, 32, 26, 24], time_prefill=0.0381, time_draft_prefill=0.0062,
        time_draft=0.7, time_verify=1.0, time_sample=0.05, time_rounds=1.8, ttft=0.0383,
        elapsed=1.84,
    )  # fmt: skip


def make_result(stats=None, **changes):
    fields = {
        "text": "a\nb", "tokens": (Token(5, "first"), Token(6, "accepted")),
        "finish_reason": "stop", "stopped_by": "\n\n", "seed": 7, "stats": stats or make_stats(),
    }  # fmt: skip
    return Result(**{**fields, **changes})


NUMBERS = [
    "prompt 412 tok | TTFT 38.3 ms (target prefill 38.1) | draft prefill 6.2 ms",
    'output 256 tok | 139.1 tok/s | TPOT 7.1 ms | finish stop:"\\n\\n" | seed 7',
    "rounds 74 | tau 3.45 tok/round | accepted 182/349 drafted (52%), 182/237 examined (77%)",
    "accepted by position .78 .60 .46 .38 .35 | gamma 5",
    "time draft 39% verify 56% sample 3% host 3% | a draft step takes 15% of a verification",
]


def test_the_lines_of_one_text():
    assert report.summary(make_result(), 5) == NUMBERS
    first = Stats(prompt_tokens=3, output_tokens=1, time_prefill=0.01, ttft=0.02, elapsed=0.02)
    result = make_result(first, finish_reason="eos", stopped_by=None)
    assert report.summary(result, 4, seed=False) == [
        "prompt 3 tok | TTFT 20.0 ms (target prefill 10.0)",
        "output 1 tok | 50.0 tok/s | TPOT 0 ms | finish eos",
    ]
    assert report.detailed(first)[0].startswith("ms  target prefill 10.0  draft prefill 0")
    assert "finish stop:9 |" in report.summary(make_result(stopped_by=9), 4)[1]
    plain = Stats(rounds=9, round_tokens=9, time_verify=0.9, time_sample=0.1, time_rounds=1.0)
    assert report.round_lines(plain, "0") == [
        "rounds 9 | tau 1.00 tok/round | plain decoding (gamma 0)",
        "time draft 0% verify 90% sample 10% host 0%",
    ]
    line = "rounds 9 | tau 1.00 tok/round | nothing drafted (gamma auto, 9 rounds without drafts)"
    assert report.round_lines(plain, "auto, 9 rounds without drafts")[0] == line
    again = Stats(prompt_tokens=9, reused_tokens=7, output_tokens=1, ttft=0.02, elapsed=0.02)
    assert report.answer(make_result(again)).startswith("prompt 9 tok (7 reused) | TTFT 20.0 ms")


def test_detailed():
    lines = report.detailed(make_stats())
    assert lines[0] == "draft 1: accepted 58/74 drafted (78%), 58/74 examined (78%)"
    assert lines[4] == "draft 5: accepted 24/68 drafted (35%), 24/26 examined (92%)"
    assert lines[5] == "rounds by accepted drafts  0: 16  1: 16  2: 10  3: 6  4: 2  5: 24"
    assert lines[6].endswith("verify 1000.0  sample 50.0  host 50.0  total 1840.0")
    assert lines[7:] == ["a draft step 2.0 ms, a verification 13.5 ms"]


def test_the_theorem_is_in_plain_steps():
    """Fault: c was relative to a verification, which takes longer than a plain step: c was .15 here
    instead of .22, and the result 1.97x."""
    costs = RoundCosts.of(0.7 / 349, {0: 0.009, 5: 0.0135}, 5)
    assert report.detailed(make_stats(), costs)[7] == (
        "a draft step 2.0 ms, a verification 13.5 ms, a plain step 9.0 ms | "
        "Theorem 3.8 at alpha .77, gamma 4.7, c .22: 1.64x"
    )


def test_all_but_a_few_is_not_all():
    """Fault: 1634 of 1641 were 100%."""
    stats = replace(make_stats(), drafted=1641, accepted=1634, examined=1634,
                    drafted_at=[1641, 5, 9], accepted_at=[1640, 5, 0])  # fmt: skip
    first, second, *_ = report.round_lines(stats, "3")
    assert first.endswith("1634/1641 drafted (99%), 1634/1634 examined (100%)")
    assert second.startswith("accepted by position .99 1.00 .00 |")


def test_memory():
    parts = {"target": int(14.2 * 2**30), "cache": int(1.2 * 2**30)}
    assert report.memory(parts) == "memory 15.4 GiB = target 14.2 + KV 1.2"


def test_baseline():
    plain = make_result(Stats(output_tokens=100, elapsed=2.0))
    line = report.baseline(make_result(), plain, same=True)
    assert line == "baseline 50.0 tok/s -> 2.78x | same tokens"
    assert report.baseline(make_result(), plain, same=False).endswith("2.78x | output 100 tok")
    other = make_result(plain.stats, tokens=(Token(5, "first"), Token(9, "plain")))
    assert "different tokens from 1 on" in report.baseline(make_result(), other, same=True)
    body = {"tokens_per_second": 50.0, "output_tokens": 100, "speedup": 2.7826}
    assert report.baseline_object(make_result(), other, same=False) == body
    body["same_tokens"] = False
    assert report.baseline_object(make_result(), other, same=True) == body


def test_batch_summary():
    other = make_result(finish_reason="eos", stopped_by=None)
    lines = report.batch_summary([make_result(), other, make_result()], 2.0, "4-5")
    assert lines[:2] == [
        "requests 3 | prompts 1236 tok | finish eos 1 stop 2",
        "output 768 tok | 384.0 tok/s | 2.0 s",
    ]
    assert lines[2].startswith("rounds 222 | tau 3.45 tok/round | accepted 546/1047")


def test_json_has_no_infinity():
    token = Token(5, "first", -0.123456789, ((5, -0.123456789), (6, -math.inf)))
    line = report.json_line(report.json_object(make_result(tokens=(token,)), logprobs=True))
    first = {"id": 5, "logprob": -0.123457}
    alternatives = [first, {"id": 6, "logprob": None}]
    assert json.loads(line)["logprobs"] == [{**first, "alternatives": alternatives}]
    assert "\n" not in line
