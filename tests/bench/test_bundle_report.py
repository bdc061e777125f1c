"""The report page of a tiny bundle, and of a measurement with known numbers."""

from __future__ import annotations

import base64
import errno
import html
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import error_line, leftovers
from workshop import Workshop

from bench.report import measurement as measuring
from bench.report import page
from bench.report.measurement import Measurement
from runtime.files.errors import EXIT_STATUS
from runtime.stats import Stats
from runtime.theory.formulas import speedup
from runtime.theory.measure import format_report, summarise

NASTY = """<script>alert("&amp; it's")</script>"""
MS = 1e-3


def text_of(gamma: int, accepted: list[int]) -> Stats:
    """Statistics of rounds in which a draft step takes 1 ms and the rest 7 + gamma ms."""
    stats = Stats(prompt_tokens=3, time_draft_prefill=14 * MS if gamma else 0)
    for n in accepted:
        stats.count_round(gamma, n, min(gamma, n + 1), n + 1)
        stats.time_draft += gamma * MS
        stats.time_rounds += (2 * gamma + 7) * MS
    return stats


def measurement() -> Measurement:
    texts = {
        0: [text_of(0, [0] * 12)],
        1: [text_of(1, [1, 0, 1, 1, 0, 1, 1])],
        2: [text_of(2, [2, 0, 1, 2, 2])],
    }
    return Measurement(summarise(texts), texts)


def findings_text(m: Measurement) -> str:
    return format_report(m.findings, 1, 0.0, 12)


def test_the_page_has_what_was_found_and_nothing_is_markup() -> None:
    m, alpha = measurement(), (5 + 7) / (7 + 9)
    gain = speedup(alpha, 2, 1 / 7, 9 / 7)
    assert m.expected_speedup(2) == pytest.approx(gain)
    assert m.measured_speedups(2) == [pytest.approx(12 / 5 * 7 / 11)]
    text = page.render(NASTY, {"Bundle": NASTY}, findings_text(m), m)
    shown = html.unescape(text)
    assert "alpha 0.750 (accepted of examined) | c 0.143 | a plain step 7.00 ms" in shown
    assert f"use --gamma 2: {gain:.2f}x expected, 1.53x measured;" in shown
    assert f"it pays from {2 / (1 - 1 / gain):.0f} output tokens on" in shown
    assert "<script" not in text and text.count(html.escape(NASTY, quote=False)[:20]) == 3
    assert page.PAGE_MARK in text.encode()[:2000]


def test_where_nothing_gains_the_page_says_so_and_so_it_does_of_a_busy_machine() -> None:
    """Also: a bundle with a single gamma can be plotted."""
    m = measurement()
    costs = replace(m.findings.costs, draft=3.0, verify=m.findings.costs.verify[:2])
    few = {gamma: m.texts[gamma] for gamma in (0, 1)}
    costly = Measurement(replace(m.findings, costs=costs, measured={1: 1.0}), few, lost=0.3)
    text = page.render("x", {}, findings_text(costly), costly)
    assert "use --gamma 0: no draft length gains" in text and "0.30 seconds" in text
    assert "seconds for a core" not in page.render("x", {}, findings_text(m), m)
    impossible = replace(m.findings.costs, verify=(1.0, 0.65, 1.3))
    found = replace(m.findings, costs=impossible)
    assert "other programs disturbed the times" in format_report(found, 1, 0.0, 12)
    assert "disturbed" not in findings_text(m)


def test_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('one\n\n"two\\nlines"\n{"a": 1}\n  12\n"open\n', encoding="utf-8")
    assert page.read_prompts(str(file)) == ["one", "two\nlines", '{"a": 1}', "  12", '"open']
    file.write_text("\n \n")
    assert page.main(["--engines", "x", "--prompts", str(file)]) == EXIT_STATUS["prompt"]
    assert "has no prompts" in error_line(capsys.readouterr().err, "prompt")


@pytest.fixture
def pair(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measuring, "REPEATS", 2)
    return workshop.bundle(workshop.checkpoint("llama"), workshop.checkpoint("llama", blur=0.1))


def test_the_page_of_a_bundle(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "page"
    prompts.write_text(f"some words\n{NASTY}\n", encoding="utf-8")
    argv = ["--engines", pair, "--prompts", prompts, "--out", out, "--tokens", 8]
    assert page.main([f"{a}" for a in argv]) == 0
    streams = capsys.readouterr()
    assert streams.out == f"{out / page.PAGE_FILE}\n"
    assert "prompt 2 of 2, with gamma 0 to 8" in streams.err
    text = (out / page.PAGE_FILE).read_text(encoding="utf-8")
    assert all(f"\n{gamma:>5}  " in text for gamma in range(1, 9))
    assert "measured on 2 prompts, 8 tokens for each gamma, temperature 0" in text
    (source,) = re.findall(r'<img src="data:image/png;base64,([^"]*)"', text)
    image = base64.b64decode(source)
    assert image.startswith(b"\x89PNG\r\n\x1a\n") and len(image) > 5000
    assert f"--out={out} --tokens=8 --temperature=0.0</td>" in text
    # The page works offline: it fetches nothing and runs no scripts.
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<script", text)
    page.check_page(out / page.PAGE_FILE)  # a report page may be replaced
    (out / page.PAGE_FILE).write_text("x")
    assert page.main([f"{a}" for a in argv]) == EXIT_STATUS["disk"]
    assert "is not a report page" in error_line(capsys.readouterr().err, "disk")
    assert leftovers(out) == []


def test_failures_are_one_line_and_leave_nothing(
    pair: Path,
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, file, prompts = (tmp_path / name for name in ("page", "file", "prompts.txt"))
    file.write_text("x")
    prompts.write_text("x" * 5000)

    def failed(kind: str, *argv: object) -> str:
        given = ["--out", out, *argv] if "--out" not in argv else argv
        assert page.main([f"{a}" for a in given]) == EXIT_STATUS[kind]
        return error_line(capsys.readouterr().err, kind)

    alone = workshop.bundle(workshop.checkpoint("llama"))
    assert "has no draft" in failed("option", "--engines", alone)
    failed("option", "--engines", pair, "--tokens", 1)
    failed("option", "--engines", pair, "--temperature", -1)
    failed("prompt", "--engines", pair, "--prompts", prompts)
    for place in (file / "page", file):
        failed("disk", "--engines", pair, "--out", place)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(page, "measure_prompts", lambda *_: measurement())
        patched.setattr(Path, "replace", full)
        failed("disk", "--engines", pair)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name)
    )
    failed("backend", "--engines", pair)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "page", "prompts.txt"]
