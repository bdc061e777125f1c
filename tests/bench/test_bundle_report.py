"""The page of bench/report.py: on a tiny bundle, and of a measurement whose numbers are known."""

from __future__ import annotations

import errno
import importlib.util
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from checkpoints import Workshop
from commands import error_line, leftovers

from bench import report, report_record
from bench.report_data import (
    Measurement,
    accepted_counts,
    ahead_from,
    by_length,
    by_position,
    capped_geometric,
    interval,
    sections,
    speed_ratios,
    traced,
)
from bench.report_plots import PLOTS, draw
from bench.report_record import Round, Text, quickest, record, recording
from runtime.bundle import load
from runtime.files.errors import EXIT_STATUS
from runtime.stats import Stats
from runtime.theory.formulas import expected_tokens, speedup
from runtime.theory.measure import findings

NASTY = """<script>alert("&amp; it's")</script>"""
MS = 1e-3


# A scripted measurement: no model, no clock


def round_of(gamma: int, accepted: int, seconds: float | None = None) -> Round:
    """A draft call takes 1 ms, a verification 5 + gamma, sampling 1, the host 1."""
    whole = (2 * gamma + 7) * MS if seconds is None else seconds
    return Round(
        tuple(range(gamma)), accepted, accepted + 1, 0, whole, 0, gamma * MS, (5 + gamma) * MS, MS
    )


def text_of(gamma: int, accepted: list[int], *, ttft: float = 10 * MS) -> Text:
    """Rounds one after the other, and the statistics that a decoder would keep of them."""
    stats, rounds, now = Stats(prompt_tokens=3, output_tokens=1, ttft=ttft), [], ttft
    for n in accepted:
        x = round_of(gamma, n)
        rounds.append(replace(x, begin=now, end=now + x.seconds))
        now = rounds[-1].end
        stats.count_round(gamma, n, min(gamma, n + 1), n + 1)
        stats.time_draft += x.draft
        stats.time_verify += x.verify
        stats.time_sample += x.sample
        stats.time_rounds += x.seconds
        stats.output_tokens += n + 1
    stats.elapsed = now
    return Text(gamma, tuple(rounds), stats)


def measurement() -> Measurement:
    texts = {
        0: [text_of(0, [0] * 12)],
        1: [text_of(1, [1, 0, 1, 1, 0, 1, 1])],
        2: [text_of(2, [2, 0, 1, 2, 2])],
    }
    stats = {gamma: [text.stats for text in some] for gamma, some in texts.items()}
    return Measurement(findings(stats), texts)


class Page(HTMLParser):
    """Elements with their attributes, and the text of those that hold it."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_positions_and_histogram_of_scripted_rounds() -> None:
    rounds = [round_of(3, 3), round_of(3, 0), round_of(3, 1), round_of(1, 1), round_of(0, 0)]
    assert by_position(rounds) == [(4, 3), (2, 1), (1, 1)]
    assert accepted_counts(rounds, 3) == [1, 1, 0, 1], "the round that drafted less is left out"
    assert by_position([]) == []


@pytest.mark.parametrize(("alpha", "gamma"), [(0.0, 3), (0.7, 1), (0.7, 5), (1.0, 4)])
def test_the_geometric_histogram_is_equation_1(alpha: float, gamma: int) -> None:
    shares = capped_geometric(alpha, gamma)
    assert sum(shares) == pytest.approx(1)
    mean = sum(k * share for k, share in enumerate(shares))
    assert 1 + mean == pytest.approx(expected_tokens(alpha, gamma))


def test_an_interval() -> None:
    low, high = interval(50, 100)  # Wilson 1927
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert interval(0, 0) == (0, 1) and interval(0, 10)[0] == 0 and interval(10, 10)[1] == 1


def test_speedup_by_length_counts_from_the_start() -> None:
    m = measurement()
    # Plain: 10 ms, then 7 ms a token. gamma 2: 10 ms, then 11 ms for 3, 1, 2, 3, 3 tokens.
    assert [point[0] for point in by_length(m, 2)] == [
        pytest.approx((10 + 7 * n) / (10 + 11 * rounds))
        for n, rounds in zip(range(13), [0, 1, 1, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5], strict=True)
    ]
    assert speed_ratios(m.texts, 2) == [pytest.approx((12 / 55) / (1 / 7))]
    assert ahead_from([(1, 1, 1), (2, 2, 2), (0.9, 0, 1), (1.1, 1, 2)]) == 4
    assert ahead_from([(2, 2, 2)]) == 1 and ahead_from([(2, 2, 2), (0.5, 0, 1)]) is None


def test_the_trace_has_the_same_tokens_for_each_gamma() -> None:
    chosen = traced(measurement())
    assert list(chosen) == [2, 1, 0]
    assert [sum(x.emitted for x in rounds) for rounds in chosen.values()] == [12, 12, 12]


def test_the_quickest_of_each_round() -> None:
    slow, other = text_of(2, [2, 0]), text_of(2, [1, 1])
    waited = replace(slow.rounds[1], end=slow.rounds[1].end + 50 * MS)
    disturbed = replace(slow, rounds=(slow.rounds[0], waited))
    first = replace(slow.rounds[0], begin=-40 * MS)
    late = replace(slow, rounds=(first, slow.rounds[1]))
    made = quickest([disturbed, late])
    assert [x.seconds for x in made.rounds] == [pytest.approx(11 * MS)] * 2
    assert made.stats.time_rounds == pytest.approx(22 * MS)
    assert made.stats.elapsed == pytest.approx(32 * MS) == made.rounds[-1].end
    other.stats.elapsed = 1.0
    assert quickest([slow, other]).rounds[1].fate() == slow.rounds[1].fate(), "never mixed"


def test_the_tables_have_the_numbers_that_were_measured() -> None:
    m = measurement()
    table = {section.name: section.table.rows for section in sections(m)}
    alpha = (5 + 7) / (7 + 9)
    assert m.found.alpha == alpha and m.found.costs.draft == pytest.approx(1 / 7)
    for gamma, (row, tau) in enumerate(zip(table["sweep"], (1, 12 / 7, 12 / 5), strict=True)):
        seconds = (2 * gamma + 7) * MS
        assert row[:3] == (
            f"{gamma}", f"{tau / seconds:.1f}", f"{tau / seconds * 7 * MS:.2f}x"
        )  # fmt: skip
        assert row[4] == f"{speedup(alpha, gamma, 1 / 7):.2f}x"
        assert row[5] == f"{speedup(alpha, gamma, 1 / 7, (7 + gamma) / 7):.2f}x"
        assert row[6] == f"{tau:.2f}" and row[9] == f"{(7 + gamma) / 7:.2f}"
    assert table["positions"][0][:4] == ("1", "12", "9", "75.0 %")
    assert table["positions"][1][:4] == ("2", "4", "3", "75.0 %")
    assert table["shares"][2] == ("2", "11.000", "18.2 %", "63.6 %", "9.1 %", "9.1 %")
    assert table["widths"][1][:3] == ("2", "1.14", f"{6 / 7:.2f}")
    assert [row[:3] for row in table["histogram"]] == [
        ("2", "0", "1"), ("2", "1", "1"), ("2", "2", "3"),
    ]  # fmt: skip
    assert table["trace"][0][2:] == (
        "0.000", "11.000", "0.000", "2.000", "7.000", "1.000", "2/2", "3",
    )  # fmt: skip
    assert len(table["trace"]) == 5 + 7 + 12


def test_the_page_says_what_the_tables_do_and_nothing_is_markup() -> None:
    m = measurement()
    pieces = [report.Piece("accepted", NASTY, NASTY), report.Piece("rejected", NASTY, "round 1")]
    facts = {"Bundle": NASTY, "Command": NASTY}
    text = report.render(report.Report(NASTY, facts, m, [report.Sample(NASTY, pieces, NASTY)]))
    assert "<script" not in text and "alert(&#34;" in text
    page = Page(text)
    assert page.open == [] and page.text.count(NASTY) == 2 + 2 + 4
    for section in sections(m):
        rows = [list(section.table.head), *map(list, section.table.rows)]
        assert rows in page.tables, section.name
    figures = {row[0]: row[1] for row in page.tables[0]}
    assert figures["α"] == "0.750" and figures["c"] == "0.143" and figures["τ"] == "2.40"
    assert figures["recommended γ"] == "2" and figures["a plain step"] == "7 ms"
    assert report.MARK in text.encode()[:2000]


def test_a_busy_machine_is_owned_up_to() -> None:
    m = measurement()
    quiet, busy = (
        report.render(report.Report("x", {}, replace(m, lost=lost), [])) for lost in (0.01, 0.3)
    )
    assert "0.30 seconds for a core" in Page(busy).text and "for a core" not in quiet


def test_where_nothing_gains_the_page_says_so() -> None:
    m = measurement()
    dear = replace(m, found=replace(m.found, costs=replace(m.found.costs, draft=3.0)))
    figures = {row[0]: row[1] for row in report.key_figures(dear).rows}
    assert dear.best == 0 and figures["recommended γ"] == "0: plain decoding"
    assert draw(dear).keys() == PLOTS.keys()


def test_one_gamma_is_enough_for_every_plot() -> None:
    m = measurement()
    few = {gamma: m.texts[gamma] for gamma in (0, 1)}
    narrow = replace(m.found.costs, verify=m.found.costs.verify[:2])
    one = Measurement(replace(m.found, measured={1: 1.0}, costs=narrow), few)
    assert draw(one).keys() == PLOTS.keys() == {section.name for section in sections(one)}


# A bundle


def test_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('one\n\n"two\\nlines"\n{"a": 1}\n  12\n', encoding="utf-8")
    assert report.prompts_of(str(file)) == ["one", "two\nlines", '{"a": 1}', "  12"]
    assert len(report.prompts_of(None)) == 8
    file.write_text("\n \n")
    assert report.main(["--engines", "x", "--prompts", str(file)]) == EXIT_STATUS["prompt"]
    assert "has no prompts" in error_line(capsys.readouterr().err, "prompt")


@pytest.fixture
def pair(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report_record, "REPEATS", 2)
    monkeypatch.setattr(report_record, "PATIENCE", 0.0)
    return workshop.bundle(workshop.checkpoint("llama"), workshop.checkpoint("llama", blur=0.1))


def test_the_page_of_a_bundle(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "page"
    prompts.write_text(f"some words\n{NASTY}\n", encoding="utf-8")
    argv = ["--engines", pair, "--prompts", prompts, "--out", out, "--tokens", 16]
    assert report.main([f"{a}" for a in argv]) == 0
    streams = capsys.readouterr()
    assert streams.out == f"{out / 'index.html'}\n"
    assert "prompt 2 of 2, with gamma 0 to 8" in streams.err
    text = (out / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and "<script" not in text and NASTY in page.text
    assert [image["src"] for image in page.all("img")] == [
        f"{section}.png" for section in ("sweep", "positions", "histogram", "widths", "shares",
                                         "lengths", "trace")
    ]  # fmt: skip
    assert all(image["alt"] for image in page.all("img"))
    for name in PLOTS:
        image = (out / f"{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG\r\n\x1a\n") and len(image) > 5000, name
    for said in ("recommended γ", "Bundle", "Target", "Draft", "Backend", "Machine", "Versions",
                 "Date", "--tokens 16", "What became of the drafts", "oracle"):  # fmt: skip
        assert said in page.text, said
    # Offline: nothing is fetched, nothing runs.
    assert not re.search(r"https?://|url\(|@import|<link|<iframe", text)
    # Again, in its place; never in the place of something else.
    assert report.main([f"{a}" for a in argv]) == 0
    (out / "mine.txt").write_text("x")
    capsys.readouterr()
    assert report.main([f"{a}" for a in argv]) == EXIT_STATUS["disk"]
    assert "holds mine.txt" in error_line(capsys.readouterr().err, "disk")
    assert (out / "index.html").is_file() and leftovers(tmp_path) == []


def test_what_is_recorded_is_what_was_generated(pair: Path) -> None:
    engine = load(pair)
    rounds = engine.decoder.rounds
    with recording(engine) as recorder:
        result = engine.generate("some words", gamma=3, max_new_tokens=16, ignore_eos=True)
    assert engine.decoder.rounds is rounds
    (text,) = recorder.take()
    ids = result.token_ids
    place = 1
    for x in text.rounds:
        assert tuple(ids[place : place + x.accepted]) == x.drafts[: x.accepted]
        place += x.emitted
    assert place == len(ids) and text.rounds[-1].end == result.stats.elapsed
    seen = sum(x.seconds - x.catch_up for x in text.rounds)
    assert seen == pytest.approx(result.stats.time_rounds)
    for name in ("draft", "verify", "sample"):
        whole = getattr(result.stats, f"time_{name}")
        assert sum(getattr(x, name) for x in text.rounds) == pytest.approx(whole)


def test_the_colours_are_of_the_same_text(pair: Path) -> None:
    engine = load(pair)
    options = {"temperature": 1.0, "seed": 5, "gamma": 3, "max_new_tokens": 40}
    result = engine.generate(NASTY, **options)
    sample = report.colored(engine, NASTY, 3, 1.0, 40, 5)
    kept = [p for p in sample.pieces if p.kind not in ("rejected", "unread")]
    assert "".join(p.text for p in kept) == result.text
    kinds = [p.kind for p in sample.pieces]
    assert {"accepted", "corrected", "rejected"} <= set(kinds)
    for here, after in pairwise(kinds):
        if here == "rejected":
            assert after in ("unread", "corrected")


def test_all_gammas_are_measured(pair: Path) -> None:
    said: list[str] = []
    found, texts, lost = record(load(pair), ["some words", "others"], 0.0, 12, said.append)
    assert lost >= 0
    assert list(texts) == list(range(9)) and {len(each) for each in texts.values()} == {2}
    assert all(text.gamma == gamma for gamma, each in texts.items() for text in each)
    assert len(found.costs.verify) == 9 and found.costs.plain > 0 and len(said) == 2
    assert all(text.stats.output_tokens == 12 for each in texts.values() for text in each)


def test_failures_are_one_line_and_leave_nothing(
    pair: Path,
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "page"

    def failed(kind: str, *argv: object) -> str:
        given = ["--out", out, *argv] if "--out" not in argv else argv
        assert report.main([f"{a}" for a in given]) == EXIT_STATUS[kind]
        return error_line(capsys.readouterr().err, kind)

    alone = workshop.bundle(workshop.checkpoint("llama"))
    assert "has no draft" in failed("option", "--engines", alone)
    failed("bundle", "--engines", tmp_path / "nowhere")
    failed("option", "--engines", pair, "--tokens", 1)
    failed("option", "--engines", pair, "--temperature", -1)
    failed("prompt", "--engines", pair, "--prompts", tmp_path / "none.txt")
    file = tmp_path / "file"
    file.write_text("x")
    failed("disk", "--engines", pair, "--out", file / "page")
    failed("disk", "--engines", pair, "--out", file)
    long = tmp_path / "long.txt"
    long.write_text("x" * 5000)
    failed("prompt", "--engines", pair, "--prompts", long)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(report, "record", interrupted)
        assert report.main(["--engines", f"{pair}", "--out", f"{out}"]) == 130

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    long.write_text("some words")
    with monkeypatch.context() as patched:
        patched.setattr(report, "write", full)
        failed("disk", "--engines", pair, "--prompts", long, "--tokens", 4)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name)
    )
    failed("backend", "--engines", pair)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "long.txt"]
