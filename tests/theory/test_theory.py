"""The formulas compared with the paper's figures (Leviathan, Kalman, Matias 2023) and with
simulation; and the tool on a bundle."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from commands import error_line
from workshop import Workshop

from runtime.files.errors import EXIT_STATUS
from runtime.theory.__main__ import main
from runtime.theory.formulas import (
    best_gamma,
    break_even,
    expected_tokens,
    operations,
    oracle,
    speedup,
)


@pytest.mark.parametrize(
    ("alpha", "gamma", "more", "faster"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69),
     (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86)],
)  # fmt: skip
def test_table_1(alpha: float, gamma: int, more: float, faster: float) -> None:
    assert operations(alpha, gamma, 0) == pytest.approx(more, abs=0.006)
    assert speedup(alpha, gamma, 0) == pytest.approx(faster, abs=0.006)


def test_figure_2() -> None:
    """Tokens per round: from 1 at alpha 0 to gamma + 1 at alpha 1, increasing in both."""
    for gamma in (1, 3, 5, 7, 10):
        curve = [expected_tokens(a, gamma) for a in np.linspace(0, 1, 101)]
        assert curve[0] == 1 and curve[-1] == gamma + 1
        assert all(a < b for a, b in pairwise(curve))
        # The closed form is the sum of alpha^i.
        assert curve[60] == pytest.approx(sum(0.6**i for i in range(gamma + 1)))
    assert expected_tokens(0.9, 1e9) == pytest.approx(10)


def test_figure_3() -> None:
    """The optimal gamma grows with alpha and falls with c, and no other gamma is faster."""
    for cost in (0.01, 0.02, 0.05, 0.1):
        chosen = [best_gamma(alpha, cost)[0] for alpha in (0.5, 0.6, 0.7, 0.8, 0.9)]
        assert chosen == sorted(chosen)
        for alpha, gamma in zip((0.5, 0.6, 0.7, 0.8, 0.9), chosen, strict=True):
            speeds = [speedup(alpha, g, cost) for g in range(1, 65)]
            assert speeds[gamma - 1] == max(speeds)
    assert [best_gamma(0.8, c)[0] for c in (0.01, 0.02, 0.05, 0.1)] == [14, 11, 8, 6]


def test_measured_widths() -> None:
    """A verification that costs more with each token shortens the draft, or forbids it."""
    rising = [1 + 0.2 * g for g in range(9)]
    assert best_gamma(0.8, 0.05, rising)[0] < best_gamma(0.8, 0.05)[0] == 8
    assert best_gamma(0.5, 0.05, [1 + g for g in range(9)]) == (0, 1.0)


def test_the_oracle() -> None:
    """Section 3.5: an upper bound, up to some 60 % above the best fixed gamma."""
    rng = np.random.default_rng(0)
    for alpha, cost in ((0.6, 0.02), (0.8, 0.02), (0.8, 0.1), (0.9, 0.01)):
        best, bound = best_gamma(alpha, cost)[1], oracle(alpha, cost)
        assert 1 < bound / best < 1.65
        accepted = rng.geometric(1 - alpha, 200_000) - 1
        simulated = (accepted + 1).sum() / (1 + cost * accepted).sum()
        assert simulated == pytest.approx(bound, rel=0.01)
    assert oracle(1, 0) == math.inf


def test_break_even() -> None:
    # The draft's prefill costs 10 plain steps; then each token takes half a step less.
    assert break_even(10, 2) == pytest.approx(20)
    assert break_even(0, 2) == 0
    assert break_even(10, 1) == break_even(10, 0.5) == math.inf


# The tool


def test_without_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--alpha", "0.8", "--cost", "0.05"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ +5 +3\.69 +2\.95x +1\.69x$", output, re.MULTILINE)
    assert "best   gamma 8: 3.09x" in output
    assert "bound  4.17x" in output
    assert main(["--alpha", "0.1", "--cost", "0.5"]) == 0
    assert "plain decoding, --gamma 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [[], ["--alpha", "0.5"], ["--alpha", "1.5", "--cost", "0"], ["--alpha", "1", "--cost", "-1"],
     ["--engines", "x", "--alpha", "1", "--cost", "0"], ["--engines", "x"],
     ["--alpha", "0.5", "--cost", "0", "--max-gamma", "0"],
     ["--alpha", "0.5", "--cost", "inf"], ["--alpha", "0.5", "--cost", "0", "--tokens", "9"],
     ["--engines", "x", "--prompt", "y", "--max-gamma", "1"]],
)  # fmt: skip
def test_what_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == EXIT_STATUS["option"]
    error_line(capsys.readouterr().err, "option")


def test_a_closed_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["--alpha", "0.8", "--cost", "0.05"]) == EXIT_STATUS["disk"]


def test_a_bundle(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    target = workshop.checkpoint("llama")
    folder = workshop.bundle(target, target)
    argv = ["--engines", str(folder), "--prompt", "some words", "--tokens", "12"]
    assert main(argv) == 0
    output = capsys.readouterr().out
    assert "alpha 1.000" in output, "a draft that is the target"
    assert len(re.findall(r"^ +\d+ +[\d.]+ +[\d.]+x +[\d.]+x +[\d.]+x$", output, re.MULTILINE)) == 8
    assert "use --gamma" in output
    alone = workshop.bundle(target)
    assert main(["--engines", str(alone), "--prompt", "x"]) == EXIT_STATUS["option"]
    assert main(["--engines", "nowhere", "--prompt", "x"]) == EXIT_STATUS["bundle"]
    assert main([*argv[:-1], "2"]) == EXIT_STATUS["option"]  # leaves nothing to draft
    assert Path("nowhere").exists() is False
