"""The side-by-side benchmark: how its figures are computed, and runs with fake systems."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import error_line
from test_core import CODE, PROSE, Letters, render_page
from workshop import Workshop

from bench.core import pair
from bench.core.clock import Clock, Sample
from bench.core.costs import Traffic
from bench.core.pair import Pair
from bench.core.prompts import Prompts
from bench.suites.side import run as measuring
from bench.suites.side import suite
from bench.suites.side.run import (
    DRAFT,
    LENGTHS,
    PLAIN,
    SHARED,
    TOGETHER,
    SideRun,
    TextFigures,
    compare_with_theory,
    draft_counts,
    systems,
    text_figures,
)
from bench.suites.side.suite import FULL, QUICK, SUITE, batch_jobs, run, single_jobs
from bench.suites.side.tables import BASE, MIXED, figures_of, goals
from bench.systems import SYSTEMS
from bench.systems.protocol import Request, StepsRequest, Text, Unavailable
from models.corpus import Corpus
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.gamma.costs import RoundCosts
from runtime.theory.formulas import speedup

TRAFFIC = Traffic(weights=900, row=1, rows=100, draft_weights=90)
COUNTS = {
    "rounds": 4, "drafted": 16, "examined": 12, "accepted": 9, "output_tokens": 14,
    "time_draft": 1.6, "time_verify": 4.8, "time_sample": 0.6, "time_host": 0.6,
}  # fmt: skip


SPARSE = Letters(16)


def text(*rounds: int, step: float = 1.0, first: float = 0.5, **notes: float) -> Text:
    """An output whose rounds emitted these numbers of tokens."""
    times = [first + step * i for i, count in enumerate(rounds) for _ in range(count)]
    return Text(list(range(len(times))), times, [0.0] * len(times), notes=dict(notes))


class FakeContext(AbstractContextManager):
    """A context manager in place of a peer's process; it does nothing."""

    def __exit__(self, *error: object) -> None:
        pass


def plain(step: float, first: float = 0.5) -> TextFigures:
    return text_figures([text(*[1] * 5, step=step, first=first)], "plain", TRAFFIC)


def test_ratios_are_medians_of_those_prompt_by_prompt() -> None:
    rows = [{PLAIN: plain(0.1), BASE: plain(0.3 + 0.1 * i, first=1)} for i in range(3)]
    rows += [
        {PLAIN: plain(0.1)},
        {PLAIN: plain(0.1), BASE: text_figures([text(5)], "plain", TRAFFIC)},
    ]
    ours, theirs = (figures_of(rows, name, 5000) for name in (PLAIN, BASE))
    assert ours["speed"] == pytest.approx(10) and ours["tau"] == 1
    assert ours[BASE] == pytest.approx(4) and theirs[PLAIN] == pytest.approx(1 / 4)
    assert theirs["first"] == 1000 and figures_of(rows, "genai plain", 5000) == {}


def test_the_floor_of_a_token_is_its_share_of_a_round_s_bytes() -> None:
    assert figures_of([{PLAIN: plain(0.5)}], PLAIN, 5000)["floor"] == 200
    drafted = {
        mode: text_figures([text(1, 2, 2)], mode, TRAFFIC) for mode in ("draft", "assistant")
    }
    found = figures_of([drafted], "draft", 5000)
    assert found["tau"] == 2 and found["floor"] == pytest.approx(1e3 * 1360 / 5000 / 2)
    assert figures_of([drafted], "assistant", 5000)["floor"] is None  # its drafts are unknown


def test_acceptance_follows_from_rounds_of_a_fixed_gamma() -> None:
    """Rounds of 1 token (rejected at once), 3, and 5 (all 4 accepted); the last round does not
    count."""
    found = draft_counts(text(2, 1, 3, 5, 1), "draft")
    assert found == {"accepted": 6, "examined": 1 + 3 + 4, "drafted": 12, "drafting": 3}
    assert draft_counts(text(2, 1, 3), "assistant") == {}
    assert draft_counts(text(1, **COUNTS), "auto")["accepted"] == 9  # ours are counted


def test_the_prediction_is_theorem_3_8_with_costs_measured_apart() -> None:
    notes = {
        "output_tokens": 11, "time_draft": 0.0, "time_verify": 9.0, "time_sample": 0.5,
        "time_host": 0.5,
    }  # fmt: skip
    own = text_figures([text(*[1] * 11, **notes)], "plain", TRAFFIC)
    fast = text_figures([text(1, 4, 3, 4, 2, **COUNTS)], "draft", TRAFFIC)
    found = compare_with_theory(own, fast, RoundCosts(2.0, 0.1, [1, 1.1, 1.2, 1.3, 1.5]))
    assert found["alpha"] == 0.75 and found["given"] == 13 / 4
    assert found["predicted"] == pytest.approx(speedup(0.75, 4, 0.1, 1.5), abs=1e-3)
    assert found["measured"] == pytest.approx(13 / 7.6)  # tokens in a plain step's time
    assert found["quotient"] == found["measured"] / found["predicted"]
    dearer = compare_with_theory(own, fast, RoundCosts(2.0, 0.2, [1, 1.1, 1.2, 1.3, 1.5]))
    assert dearer["measured"] == found["measured"]
    assert dearer["predicted"] < found["predicted"]  # the costs do not cancel


def test_batches_are_timed_from_the_last_first_token() -> None:
    early = Text([0] * 4, [1.0, 3.0, 4.0, 5.0], [0.0] * 4)
    late = Text([0] * 4, [2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.3])
    found = text_figures([early, late], "plain", TRAFFIC)
    assert found == {"first": 2.0, "token": 3 / 6, "lost": pytest.approx(0.1)}
    assert text_figures([text(2), text(2)], "plain", TRAFFIC) == {"first": 0.5}


def test_goals_are_met_by_medians_or_not_told() -> None:
    row = {
        PLAIN: plain(1, first=0.5), DRAFT: {**plain(0.5), "quotient": 0.97}, MIXED: plain(0.4),
        BASE: plain(4, first=1), "transformers assistant": plain(3),
        "llama.cpp plain": plain(1.1, first=0.6),
    }  # fmt: skip
    held = {PLAIN: {"ratio": 1.3}, BASE: {"ratio": 9.0}}
    loads = {"outrider float32": [1.0, 3.0]}

    def met(row: dict[str, TextFigures], **more: Any) -> list[str]:
        batches = {
            "group": TOGETHER,
            "rows": [{PLAIN: plain(9), BASE: plain(1)}] * 3,
        }  # not part of the goals
        cells = [{"group": SHARED, "rows": [row]}, batches]
        return [goal["met"] for _, goal in goals({"cells": cells, "pair": {"shape": "1b"}, **more})]

    assert met(row, memory=held, loads=loads) == [
        *["yes"] * 7, *["not measured"] * 8, *["yes"] * 3, "no",
    ]  # fmt: skip
    slow = met({**row, PLAIN: plain(2, first=0.7)}, memory={}, loads={})
    assert slow[:2] == ["no", "no"] and slow[-1] == "not measured"


def test_who_gets_which_workload() -> None:
    every = systems(list(SYSTEMS))
    prompts = Prompts(SPARSE, [*CODE, *PROSE])
    work = single_jobs(FULL, prompts, every)
    assert {len(job.systems) for job in work if job.group == SHARED} == {len(every)}
    (long,) = {tuple(s.name for s in job.systems) for job in work if job.group == LENGTHS}
    assert long == (
        "outrider int4 plain", "outrider int4 draft", "outrider int4 auto", BASE,
        "transformers assistant", "genai int4 plain", "llama.cpp q4_0 plain",
    )  # fmt: skip
    assert {len(x.prompts[0]) for job in work for x in job.requests} == {16, 128, 1024, 1500}
    sizes = [[len(x.prompts) for x in job.requests] for job in batch_jobs(FULL, prompts, every)]
    assert sizes == [[n] * 3 for n in (1, 2, 4, 8)]


class FakePeer(FakeContext):
    """Generates at a fixed speed per system, with the facts of a 10 MB model."""

    facts: ClassVar[dict[str, Any]] = {
        "load_seconds": 0.5, "weights": 10**7, "draft_weights": 10, "cache_element": 4,
        "before": 100, "dtype": "float32", "plain_width": 2,
    }  # fmt: skip

    def __init__(self, name: str, target: Path, **options: Any):
        self.peer = name

    def generate(self, request: Request) -> list[Text]:
        if len(request.prompts) > 1:
            if request.mode == "draft":
                raise Unavailable("one text at a time")
            return [text(*[1] * request.new_tokens) for _ in request.prompts]
        if request.mode == "lookup":
            raise Unavailable("no such thing in /home/me/build/model.bin")
        notes = {**COUNTS, "drafted": 16 if request.mode == "draft" else 0}
        step = {"outrider": 0.01, "transformers": 0.03}[self.peer]
        made = text(*[1] * request.new_tokens, step=step, **notes)
        made.peak = 2 * 10**7
        return [made]

    def time_steps(self, request: StepsRequest) -> dict[str, list[Any]]:
        raise Unavailable("no draft model")


def test_what_is_not_measured_is_refused_before_a_pair_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, cause in (
        (["--systems", "genai"], "--systems does not include outrider"),
        (["--systems", "outrider", "ctranslate2"], "ctranslate2 does not run this shape"),
        (["--draft", "d"], "--draft needs a --model"),
        (["--model", "m", "--precision", "mixed"], "--precision mixed is a precision of drafts"),
        (["--model", "m", "--alpha", "0"], "--shape and --alpha apply to the grown pair"),
    ):
        assert SUITE.main([*options, "--work", str(tmp_path)]) == EXIT_STATUS["option"]
        assert cause in error_line(capsys.readouterr().err, "option")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert SUITE.main(["--work", str(tmp_path / "file" / "deeper")]) == EXIT_STATUS["disk"]
    error = capsys.readouterr().err
    assert "not a writable folder" in error_line(error, "disk") and "another --work" in error


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SideRun:
    """A run with fake systems."""
    monkeypatch.setattr(measuring, "Peer", FakePeer)
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return SideRun(Pair(tmp_path, tmp_path, "s", 0.8), 1, tmp_path, Clock())


def test_a_run_of_int8_alone_measures_everything_in_int8(
    side: SideRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without systems is dropped."""
    samples = {name: [Sample(0.01)] for name in ("draft", "1", "2", "3", "4", "5")}
    monkeypatch.setattr(FakePeer, "time_steps", lambda *_: samples)
    prompts, chosen = Prompts(SPARSE, [*CODE, *PROSE]), systems(["outrider"], ["int8"])
    works = [single_jobs(QUICK, prompts, some) for some in (chosen, [])]
    works.append(batch_jobs(QUICK, prompts, chosen))
    results = run(side, chosen, works, None)
    cells = results["cells"]
    assert [cell["group"] for cell in cells] == [SHARED] * 4 + [TOGETHER] * 2
    assert all("outrider int8 plain" in row for cell in cells for row in cell["rows"])
    page = render_page(SUITE, results)
    assert page.count("\n| int8 draft, editing 128+24, temperature ") == 2  # Theorem 3.8
    assert "Theorem 3.8 | at least 0.95 |  | not measured" not in page


def test_checkpoints_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    workshop: Workshop,
) -> None:  # fmt: skip
    """Without a draft model no system drafts with one; goals apply only to the grown pair."""
    monkeypatch.setattr(measuring, "Peer", FakePeer)
    texts = [file.read_text() for file in sorted(Path(suite.__file__).parents[2].rglob("*.py"))]
    monkeypatch.setattr(suite, "collect", lambda: Corpus([], texts))
    options = ["--quick", "--precision", "float32", "--systems", "outrider", "transformers"]
    target, where = str(pair.TARGET), ["--work", str(tmp_path)]
    assert SUITE.main([*options, "--model", target, *where]) == 0
    page, _, line = capsys.readouterr().out.strip().rpartition("\n")
    results = json.loads(line)
    assert results["pair"] == {"shape": "target", "alpha_wanted": None}
    assert results["systems"] == [PLAIN, "outrider lookup", BASE, "transformers lookup"]
    assert "; target, gamma 4;" in page and "Goals" not in page
    assert pair.from_checkpoints(pair.TARGET, pair.DRAFT).shape == "target and draft"
    for folder, cause in (
        (workshop.checkpoint("t5"), "is an encoder-decoder"),
        (tmp_path / "nowhere", "nowhere"),
    ):
        assert SUITE.main(["--model", str(folder), *where]) != 0
        assert cause in capsys.readouterr().err
    short = workshop.checkpoint("llama")
    assert SUITE.main(["--model", str(short), *where]) == EXIT_STATUS["option"]
    assert "longer than the model's 256" in capsys.readouterr().err


def test_a_run_that_measured_nothing_ends_with_the_reason(
    side: SideRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each system is started once."""
    started = []

    def fail(name: str, target: Path, **options: Any) -> None:
        started.append(name)
        raise Unavailable("the disk is full")

    monkeypatch.setattr(measuring, "Peer", fail)
    prompts, chosen = Prompts(SPARSE, [*CODE, *PROSE]), systems(["outrider"], ["int4"])
    works = [single_jobs(QUICK, prompts, chosen), batch_jobs(QUICK, prompts, chosen)]
    with pytest.raises(OutriderError, match="measured: outrider int4 failed"):
        run(side, chosen, works, prompts.completion(128))
    assert started == ["outrider"]


def test_a_whole_run_with_systems_that_only_pretend(side: SideRun, tmp_path: Path) -> None:
    """Anything missing is noted once and affects no other figure."""
    prompts = Prompts(SPARSE, [*CODE, *PROSE])
    chosen = systems(["outrider", "transformers"], ["float32"])
    works = [single_jobs(QUICK, prompts, chosen), batch_jobs(QUICK, prompts, chosen)]
    results = run(side, chosen, works, prompts.completion(128))
    assert results["missing"]["outrider lookup"] == "no such thing in model.bin"
    assert results["missing"]["outrider draft, 4 together"] == "one text at a time"
    assert results["missing"]["costs of outrider"] == "no draft model"
    last = results["cells"][-1]
    assert last["name"] == "4 together" and last["rows"][0].keys() == {PLAIN, BASE}
    assert results["memory"][PLAIN]["cache"] == 192 * 8
    assert results["memory"][DRAFT]["cache"] == 2 * 192 * 8

    page = render_page(SUITE, results)
    lines = page.splitlines()
    assert any(line.startswith(f"| {PLAIN} | 100.0 |") and "| 3.00 |" in line for line in lines)
    assert any(line.startswith(f"| 4 together, {PLAIN} |") for line in lines)
    assert (
        "| plain decoding, speed vs. llama.cpp float32 plain | at least 1 |  | not measured |"
        in lines
    )
    assert "; Outrider's plain steps are calls of 2 tokens; " in page
    assert str(tmp_path) not in page
