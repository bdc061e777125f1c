"""The building blocks of suites: timing, orders, fits, costs, tables, prompts, command line."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import error_line, limited_files
from scipy.stats import linregress

from bench import __main__ as command_line
from bench.core import machine, runs
from bench.core.cache import cached_folder
from bench.core.clock import Clock, Sample, median_time, order, sample_in_turn
from bench.core.command import Suite
from bench.core.costs import (
    Traffic,
    costs_from_calls,
    costs_from_rounds,
    predicted_speedup,
    row_bytes,
    verify_cost,
)
from bench.core.fit import Spread, fit_power_law, fit_shifted_power_law
from bench.core.prompts import KINDS, Prompts
from bench.core.record import RoundRecord, Run
from bench.core.runs import Way
from bench.core.table import make_table
from bench.suites import embed
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.gamma.costs import RoundCosts
from runtime.stats import Stats
from runtime.theory import formulas as theory

X = [1.0, 2, 4, 8, 16, 32, 64]
STEP, DRAFT, WIDER = 0.01, 0.002, 0.001  # seconds: a plain step, a draft step, each further token
FUNCTION = "def area(width, height):\n" + "".join(
    f"    total_{i} = width * height + {i}\n" for i in range(12)
)
CODE = [f"import os\n\nclass A{i}:\n    pass\n\n{FUNCTION}\nfrom a import b\n" for i in range(6)]
PROSE = [f"Line {i} of a text about nothing much.\n" * 40 for i in range(5)]


# Time


def test_a_figure_leaves_disturbed_samples_out_while_there_are_enough() -> None:
    quiet = [Sample(0.010 + i * 1e-5) for i in range(9)]
    mixed = median_time([*quiet, *[Sample(0.5, lost=0.9)] * 20])
    assert mixed.ms == pytest.approx(10.04) and (mixed.kept, mixed.taken) == (9, 29)
    busy = median_time([Sample(0.02 + i, lost=0.1 + i / 100) for i in range(20)])
    assert busy.kept == 0 and busy.ms == pytest.approx(2020)  # from the least disturbed


@pytest.mark.parametrize("count", [2, 3, 16])
def test_nothing_is_always_first_or_always_after_the_same(count: int) -> None:
    items = list(range(count))
    orders = [order(items, turn) for turn in range(12)]
    assert all(sorted(x) == items for x in orders)
    firsts = Counter(x[0] for x in orders)
    assert max(firsts.values()) <= 6
    before = Counter((a, b) for x in orders for a, b in pairwise(x))
    assert all(before[b, a] > 0 for a, b in before)
    assert order([], 3) == []


def test_calls_take_turns() -> None:
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in "ab"}
    taken = sample_in_turn(calls, rounds=3, patience=0.0)
    assert "".join(seen) == "ab" + "ab" + "ba" + "ba"  # the first call of each is a warm-up
    assert {name: len(some) for name, some in taken.items()} == {"a": 3, "b": 3}


# Fits


def test_a_power_law_is_recovered() -> None:
    fit = fit_power_law(X, [3 * x**2 for x in X])
    assert fit is not None and fit.exponent == pytest.approx(2, abs=1e-9)
    assert fit.high == pytest.approx(2, abs=1e-6) and fit.worst == pytest.approx(0, abs=1e-9)
    assert (
        fit_power_law([1, 2], [1, 2]) is None
        and fit_shifted_power_law([1, 2, 3], [1, 2, 3]) is None
    )
    assert (
        fit_power_law([1, 2, 3], [0, 1, 2]) is None
        and fit_shifted_power_law([1, 2, 3, 4], [0, 1, 2, 3]) is None
    )


def test_the_interval_of_an_exponent_is_student_s() -> None:
    """With two degrees of freedom fewer, for the two parameters of a line."""
    y = [x * (1.1 if i % 2 else 0.9) for i, x in enumerate(X)]
    fit, error = fit_power_law(X, y), linregress(np.log(X), np.log(y)).stderr
    assert fit is not None and fit.low < 1 < fit.high
    assert fit.high - fit.exponent == pytest.approx(2.571 * error, rel=1e-3)


@pytest.mark.parametrize(("constant", "exponent"), [(20.0, 1.0), (500.0, 2.0)])
def test_what_grows_beside_a_constant(constant: float, exponent: float) -> None:
    y = [constant + x**exponent for x in X]
    fit, line = fit_shifted_power_law(X, y), fit_power_law(X, y)
    assert fit is not None and line is not None
    assert fit.exponent == pytest.approx(exponent) and fit.constant == pytest.approx(constant)
    assert line.exponent < 0.7 * exponent and line.worst > 0.02  # control: no pure power law


def test_its_interval_under_noise_and_beside_nothing() -> None:
    rng, inside, trials = np.random.default_rng(1), 0, 40
    for _ in range(trials):
        noise = 1 + 0.02 * rng.standard_normal(len(X))
        fit = fit_shifted_power_law(X, [(20 + x) * n for x, n in zip(X, noise, strict=True)])
        assert fit is not None and fit.low is not None and fit.high is not None
        inside += fit.low <= 1 <= fit.high
    assert inside / trials > 0.9
    flat = fit_shifted_power_law(X, [5 * (1 + 0.02 * n) for n in rng.standard_normal(len(X))])
    assert flat is not None and (flat.low is None or flat.high is None)


def test_a_spread_is_a_median_and_quartiles() -> None:
    assert Spread.of([1, 2, 3, 4, 10]) == Spread(3, 2, 4, 5)
    assert f"{Spread.of([2])}" == "2.00" and Spread.of([]) is None


# Costs


def a_round(gamma: int, accepted: int, catch_up: float = 0.0) -> tuple[RoundRecord, int]:
    """A round, and the number of accepted drafts."""
    draft = gamma * DRAFT
    seconds = catch_up + draft + STEP + gamma * WIDER
    return RoundRecord(gamma, seconds, catch_up, draft), accepted


def a_run(*rounds: tuple[RoundRecord, int], lost: float = 0.0) -> Run:
    stats = Stats()
    for x, accepted in rounds:
        stats.count_round(x.gamma, accepted, min(x.gamma, accepted + 1), accepted + 1)
        stats.time_draft += x.draft
    return Run([x for x, _ in rounds], stats, lost)


def test_a_text_s_time_has_no_prompt_in_it_but_all_later_reading() -> None:
    plain = a_round(0, 0)
    run = a_run(plain, a_round(1, 0, catch_up=0.5), plain, a_round(1, 0, catch_up=0.25))
    assert run.seconds == pytest.approx(2 * STEP + 2 * (STEP + DRAFT + WIDER) + 0.25)


def test_costs_come_from_rounds() -> None:
    plain = a_run(*[a_round(0, 0)] * 20)
    rounds = [*[a_round(4, 1)] * 20, *[a_round(2, 2)] * 20, a_round(3, 0)]
    run, slow = a_run(*rounds), RoundRecord(3, 9.0, 0.0, 0.0)  # a single round is ignored
    found = costs_from_rounds([plain], [replace(run, rounds=[*run.rounds, slow])], 6)
    assert found.plain == pytest.approx(STEP)
    assert found.draft == pytest.approx(DRAFT / STEP)
    assert found.verify == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    assert found.round(4) == pytest.approx(1.4 + 4 * 0.2)


def test_costs_come_from_calls() -> None:
    ms = {"draft": 2.0, "1": 10.0, "2": 11.0, "3": 13.0}
    found = costs_from_calls({name: [Sample(x / 1e3)] * 5 for name, x in ms.items()})
    assert found.plain == pytest.approx(0.01) and found.draft == pytest.approx(0.2)
    assert verify_cost(found, 1.5) == pytest.approx(1.2)


COSTS = RoundCosts(STEP, 0.2, [1 + 0.1 * k for k in range(9)])


def test_what_is_predicted_is_the_theorem_where_all_rounds_are_alike() -> None:
    assert predicted_speedup(0.7, [4] * 5, COSTS) == pytest.approx(theory.speedup(0.7, 4, 0.2, 1.4))
    both = (theory.expected_tokens(0.7, 4) + 1) / (4 * 0.2 + 1.4 + 1)
    assert predicted_speedup(0.7, [4] * 5 + [0] * 5, COSTS) == pytest.approx(both)


def test_bytes_of_a_row_and_of_a_round(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert row_bytes(tmp_path, 4) == 2 * 3 * 32 * 4
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    assert row_bytes(tmp_path, 2) == 2 * 3 * 8 * 2
    traffic = Traffic(weights=900, row=1, rows=100, draft_weights=90)
    assert traffic.round_bytes() == 1000 and traffic.round_bytes(4) == 1360


# Requests decoded in several ways


def test_gains_and_quiet_texts() -> None:
    fast, slow = (a_run(*[a_round(0, 0)] * n) for n in (10, 15))
    texts = [{"plain": slow, "way": way} for way in (fast, slow, slow)]
    gain = runs.measured_speedup(texts, "way", "plain")
    assert gain.total == pytest.approx(45 / 40) and gain.median == pytest.approx(1)
    assert gain.error > 0.05
    assert runs.measured_speedup([{"plain": slow, "way": slow}] * 3, "way", "plain").error == 0
    disturbed = [{"way": replace(fast, lost=lost)} for lost in (0.3, 0.0, 0.5, 0.4)]
    assert [text["way"].lost for text in runs.undisturbed_texts(disturbed)] == [0.0, 0.3]
    assert len(runs.undisturbed_texts([{"way": fast}] * 3)) == 3


@pytest.mark.parametrize(("patience", "passes"), [(0.0, 1), (9.0, 3)])
def test_disturbed_texts_are_decoded_again_while_there_is_patience(
    monkeypatch: pytest.MonkeyPatch, patience: float, passes: int
) -> None:
    losses = iter([0.5, 0.1, 0.3])
    monkeypatch.setattr(runs, "decode", lambda *_: replace(a_run(), lost=next(losses)))
    found = runs.decode_all({"way": Way(None, {})}, [0], 8, 0, Clock(patience))
    assert len(list(losses)) == 3 - passes
    assert found["way"].lost == (0.5 if passes == 1 else 0.1)


# Prompts


class Letters:
    """A tokenizer. size: letters per token. same: whether all tokens are the same."""

    def __init__(self, size: int = 1, same: bool = False):
        self.size, self.same = size, same

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        pieces = (text[i : i + self.size] for i in range(0, len(text), self.size))
        return [7] * add_special_tokens + [
            1 if self.same else sum(map(ord, piece)) for piece in pieces
        ]


def prompts() -> Prompts:
    return Prompts(Letters(), [*CODE, *PROSE])


def test_prompts_have_the_length_that_was_asked_for_and_differ() -> None:
    for kind in (*KINDS, "table"):
        made = prompts().many(kind, 3, 1500)
        assert all(len(prompt) == 1500 and prompt[0] == 7 for prompt in made)
        assert len({tuple(prompt) for prompt in made}) == 3


def test_what_a_copying_prompt_ends_with() -> None:
    text = "".join(map(chr, prompts().editing(1500)))
    assert text.endswith("def area(width, height):\n") and text.count(FUNCTION) >= 2


def test_prompts_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="no function fits"):
        prompts().editing(200)
    same = Prompts(Letters(same=True), [CODE[0], PROSE[0]])
    with pytest.raises(ValueError, match="3 different prompts: continuation 16"):
        same.many("continuation", 3, 16)
    with pytest.raises(ValueError, match="code and prose"):
        Prompts(Letters(), CODE)


# Tables and commands


def test_tables_leave_out_what_no_row_has_and_mark_what_was_disturbed() -> None:
    rows = [("a", {"x": 10.0, "disturbed": True}), ("b", {})]
    table = make_table("some", rows, [("x", "tok/s", ".1f"), ("y", "no", "")], ["note"])
    assert table.head == ["", "tok/s"] and table.rows == [["a *", "10.0"], ["b", ""]]
    assert table.text() == "some\n     tok/s\na *   10.0\nb\nnote\n"
    assert "| a * | 10.0 |" in table.text(markdown=True)


SUITE = Suite(
    name="made-up",
    about="Nothing.",
    quick="less",
    measure=lambda args, clock: {"machine": machine.describe(args.threads), "value": 3.0},
    tables=lambda results: [make_table("t", [("r", dict(results))], [("value", "v", "")])],
)


def render_page(suite: Suite, results: dict[str, Any]) -> str:
    """The heading and tables of results, after a round trip through JSON."""
    read = json.loads(json.dumps(results))
    tables = (table.text(markdown=True) for table in suite.tables(read))
    return "\n".join([suite.heading(read), *tables])


def test_a_suite_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SUITE.main(["--threads", "1", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["benchmark"] == "made-up" and found["value"] == 3.0
    assert "/" not in json.dumps(found["machine"])  # no path of this machine
    assert json.loads((tmp_path / "made-up.json").read_text()) == found
    assert "| r | 3.0 |" in (tmp_path / "made-up.md").read_text()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, measured = tmp_path / "page.md", []
    page.touch()
    suite = replace(SUITE, measure=lambda args, clock: measured.append(1))
    for folder in page, page / "deeper":
        assert suite.main(["--out", str(folder)]) == EXIT_STATUS["disk"]
        assert "page.md is not a writable folder" in error_line(capsys.readouterr().err, "disk")
    assert not measured


def test_a_full_disk_leaves_nothing_half_written_and_costs_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with limited_files(10):
        assert SUITE.main(["--out", str(tmp_path)]) == EXIT_STATUS["disk"]
    streams = capsys.readouterr()
    assert json.loads(streams.out.splitlines()[-1])["value"] == 3.0
    assert "File too large" in error_line(streams.err, "disk")
    assert not [*tmp_path.iterdir()]


def test_no_option_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--threads` exists only if the suite uses it. Others refuse it instead of ignoring it."""
    options = ["--threads", "1", "--engines", str(tmp_path)]
    assert embed.SUITE.main(options) == EXIT_STATUS["option"]
    assert "--threads" in error_line(capsys.readouterr().err, "option")


@pytest.mark.parametrize(
    ("threads", "words"),
    [("0", "'0' is not an integer"), ("1000000", "--threads=1000000 is out of")],
)
def test_threads_that_cannot_be(
    threads: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SUITE.main(["--threads", threads]) == EXIT_STATUS["option"]
    assert words in error_line(capsys.readouterr().err, "option")


def test_a_program_that_cannot_be_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere")
    monkeypatch.setattr(embed, "find_library", lambda: tmp_path / "liboutrider.so")
    assert embed.SUITE.main(["--engines", str(tmp_path)]) == EXIT_STATUS["backend"]
    assert "CXX=/nowhere was not found" in error_line(capsys.readouterr().err, "backend")
    for stderr, cause in (
        ("error: x is no bundle. Build y.", "x is no bundle. Build y."),
        ("", "with status 7"),
    ):
        with pytest.raises(OutriderError, match=cause):
            embed.run_program(["sh", "-c", f"echo '{stderr}' >&2; exit 7"])


def test_the_command_line_names_its_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in command_line.SUITES)
    assert command_line.main(["nothing"]) == EXIT_STATUS["option"]
    assert "there is no suite nothing" in error_line(capsys.readouterr().err, "option")


def test_what_is_kept_is_made_again_when_its_sources_changed(tmp_path: Path) -> None:
    source, folder, made = tmp_path / "source", tmp_path / "made", []
    source.mkdir()
    (source / "room").mkdir()
    (source / "room" / "a").write_text("a")
    for _ in range(2):
        cached_folder(folder, [source], lambda: made.append(1))
    assert len(made) == 1
    (source / "room" / "a").write_text("other")
    for number in (2, 3):
        with pytest.raises(ValueError, match="half"):
            cached_folder(folder, [source], lambda: (_ for _ in ()).throw(ValueError("half")))
        cached_folder(folder, [source], lambda n=number: made.append(n))
        folder.rmdir()  # as if a user had removed the result
    assert made == [1, 2, 3]
