"""The report's page: on a tiny bundle, and of a measurement whose numbers are known."""

from __future__ import annotations

import base64
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

from bench.core.record import RoundRecord, TextRecord
from bench.report import numbers, page
from bench.report.numbers import (
    Measurement,
    ahead_from,
    by_length,
    by_position,
    interval,
    quickest,
    speed_ratios,
)
from bench.report.sections import SECTIONS
from bench.report.texts import ColoredText, Piece, colored
from runtime.bundle import load
from runtime.files.errors import EXIT_STATUS
from runtime.stats import Stats
from runtime.theory.formulas import speedup
from runtime.theory.measure import findings

NASTY = """<script>alert("&amp; it's")</script>"""
MS = 1e-3


# A scripted measurement: no model, no clock


def round_of(gamma: int, accepted: int, seconds: float | None = None) -> RoundRecord:
    """A draft call takes 1 ms, a verification 5 + gamma, sampling 1, the host 1."""
    whole = (2 * gamma + 7) * MS if seconds is None else seconds
    return RoundRecord(
        tuple(range(gamma)), accepted, accepted + 1, 0, whole, 0, gamma * MS, (5 + gamma) * MS, MS
    )


def text_of(gamma: int, accepted: list[int], *, ttft: float = 10 * MS) -> TextRecord:
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
    return TextRecord(gamma, tuple(rounds), stats)


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


def test_positions_of_scripted_rounds() -> None:
    """Of what was reached, not of what was drafted."""
    rounds = [round_of(3, 3), round_of(3, 0), round_of(3, 1), round_of(1, 1), round_of(0, 0)]
    assert by_position(rounds) == [(4, 3), (2, 1), (1, 1)]
    assert by_position([]) == []
    low, high = interval(50, 100)  # Wilson 1927
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert interval(0, 0) == (0, 1) and interval(0, 10)[0] == 0 and interval(10, 10)[1] == 1


def test_speedup_by_length_counts_from_the_start() -> None:
    m = measurement()
    # Plain: 10 ms, then 7 ms a token. gamma 2: 10 ms, then 11 ms for 3, 1, 2, 3, 3 tokens.
    assert [point[0] for point in by_length(m)] == [
        pytest.approx((10 + 7 * n) / (10 + 11 * rounds))
        for n, rounds in zip(range(13), [0, 1, 1, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5], strict=True)
    ]
    assert speed_ratios(m.texts, 2) == [pytest.approx((12 / 55) / (1 / 7))]
    assert ahead_from([(1, 1, 1), (2, 2, 2), (0.9, 0, 1), (1.1, 1, 2)]) == 4
    assert ahead_from([(2, 2, 2)]) == 1 and ahead_from([(2, 2, 2), (0.5, 0, 1)]) is None


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
    table = {made.name: made.table.rows for made in (make(m) for make in SECTIONS)}
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
    assert table["trace"][0][2:] == (
        "0.000", "11.000", "0.000", "2.000", "7.000", "1.000", "2/2", "3",
    )  # fmt: skip
    assert len(table["trace"]) == 5 + 7 + 12


def test_the_page_says_what_the_tables_do_and_nothing_is_markup() -> None:
    m = measurement()
    pieces = [Piece("accepted", NASTY, NASTY), Piece("rejected", NASTY, "round 1")]
    facts = {"Bundle": NASTY, "Command": NASTY}
    text = page.render(page.Report(NASTY, facts, m, [ColoredText(NASTY, pieces, NASTY)]))
    assert "<script" not in text and "alert(&#34;" in text
    seen = Page(text)
    assert seen.open == [] and seen.text.count(NASTY) == 2 + 2 + 4
    for section in (make(m) for make in SECTIONS):
        rows = [list(section.table.head), *map(list, section.table.rows)]
        assert rows in seen.tables, section.name
    figures = {row[0]: row[1] for row in seen.tables[0]}
    assert figures["α"] == "0.750" and figures["c"] == "0.143" and figures["τ"] == "2.40"
    assert figures["recommended γ"] == "2" and figures["a plain step"] == "7 ms"
    assert page.MARK in text.encode()[:2000]


def test_where_nothing_gains_the_page_says_so_and_so_it_does_of_a_busy_machine() -> None:
    """Also: a bundle of one gamma has something for every plot."""
    m = measurement()
    few = {gamma: m.texts[gamma] for gamma in (0, 1)}
    costs = replace(m.found.costs, draft=3.0, verify=m.found.costs.verify[:2])
    found = replace(m.found, costs=costs, measured={1: 1.0})
    dear = Measurement(found, few, lost=0.3)
    seen = Page(page.render(page.Report("x", {}, dear, [])))
    assert dear.best == 0 and seen.tables[0][0][:2] == ["recommended γ", "0: plain decoding"]
    assert "0.30 seconds for a core" in seen.text
    assert not page.warning_of(replace(m, lost=0.01))


# A bundle


def test_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('one\n\n"two\\nlines"\n{"a": 1}\n  12\n', encoding="utf-8")
    assert page.prompts_of(str(file)) == ["one", "two\nlines", '{"a": 1}', "  12"]
    assert len(page.prompts_of(None)) == 8
    file.write_text("\n \n")
    assert page.main(["--engines", "x", "--prompts", str(file)]) == EXIT_STATUS["prompt"]
    assert "has no prompts" in error_line(capsys.readouterr().err, "prompt")


@pytest.fixture
def pair(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numbers, "REPEATS", 2)
    monkeypatch.setattr(numbers, "PATIENCE", 0.0)
    return workshop.bundle(workshop.checkpoint("llama"), workshop.checkpoint("llama", blur=0.1))


def test_the_page_of_a_bundle(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "page"
    prompts.write_text(f"some words\n{NASTY}\n", encoding="utf-8")
    argv = ["--engines", pair, "--prompts", prompts, "--out", out, "--tokens", 8]
    assert page.main([f"{a}" for a in argv]) == 0
    streams = capsys.readouterr()
    assert streams.out == f"{out / page.PAGE}\n"
    assert "prompt 2 of 2, with gamma 0 to 8" in streams.err
    text = (out / page.PAGE).read_text(encoding="utf-8")
    seen = Page(text)
    assert seen.open == [] and "<script" not in text and NASTY in seen.text
    assert [row[0] for row in seen.tables[2][1:]] == [f"{gamma}" for gamma in range(9)]
    images = [base64.b64decode(str(image["src"]).split(",")[1]) for image in seen.all("img")]
    assert len(images) == len(SECTIONS)
    for image in images:
        assert image.startswith(b"\x89PNG\r\n\x1a\n") and len(image) > 5000
    for said in ("recommended γ", "Bundle", "Target", "Draft", "Backend", "Machine", "Versions",
                 "Date", "--tokens 8", "What became of the drafts", "oracle"):  # fmt: skip
        assert said in seen.text, said
    # Offline: nothing is fetched, nothing runs.
    assert not re.search(r"https?://|url\(|@import|<link|<iframe", text)
    page.check_place(out / page.PAGE)  # its own may be replaced
    (out / page.PAGE).write_text("x")
    assert page.main([f"{a}" for a in argv]) == EXIT_STATUS["disk"]
    assert "is not a page of ours" in error_line(capsys.readouterr().err, "disk")
    assert leftovers(out) == []


def test_the_colours_are_of_the_same_text(pair: Path) -> None:
    engine = load(pair)
    options = {"temperature": 1.0, "seed": 5, "gamma": 3, "max_new_tokens": 40}
    result = engine.generate(NASTY, **options)
    sample = colored(engine, NASTY, 3, 1.0, 40, 5)
    kept = [p for p in sample.pieces if p.kind not in ("rejected", "unread")]
    assert "".join(p.text for p in kept) == result.text
    kinds = [p.kind for p in sample.pieces]
    assert {"accepted", "corrected", "rejected"} <= set(kinds)
    for here, after in pairwise(kinds):
        if here == "rejected":
            assert after in ("unread", "corrected")


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
        assert page.main([f"{a}" for a in given]) == EXIT_STATUS[kind]
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
        patched.setattr(page, "take", interrupted)
        assert page.main(["--engines", f"{pair}", "--out", f"{out}"]) == 130

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    long.write_text("some words")
    with monkeypatch.context() as patched:
        patched.setattr(page, "take", lambda *_: measurement())
        patched.setattr(page, "colored", lambda *_: ColoredText("", [], ""))
        patched.setattr(Path, "write_text", full)
        failed("disk", "--engines", pair, "--prompts", long, "--tokens", 4)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name)
    )
    failed("backend", "--engines", pair)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "long.txt"]
