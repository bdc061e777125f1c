"""The quality lost by quantising the bundled draft; llama.cpp's rows if its binding is present."""

from __future__ import annotations

import json

import pytest
from commands import error_line
from workshop import Workshop

from bench.core.clock import Clock
from bench.core.pair import DRAFT
from bench.suites.quality import SUITE, outrider_models
from bench.systems import SYSTEMS
from export.checkpoint import find
from runtime.files.errors import EXIT_STATUS


def test_fewer_bits_cost_more(capfd: pytest.CaptureFixture[str]) -> None:
    assert SUITE.main(["--quick", "--threads", "1", "--model", str(DRAFT)]) == 0
    output = capfd.readouterr().out
    results = json.loads(output.splitlines()[-1])
    eight, four = results["rows"]["Outrider int8"], results["rows"]["Outrider int4"]
    assert 0 < eight["kl"] < 1e-3 < four["kl"] < 0.05
    assert 4.5 < four["bits"] < eight["bits"] == pytest.approx(8.5, abs=0.01)
    if missing := SYSTEMS["llama.cpp"].missing_reason():
        assert f"llama.cpp: {missing}." in output


def test_bits_are_those_of_the_matrices_that_are_quantised(workshop: Workshop) -> None:
    """GPT-2's table of positions is not."""
    checkpoint = find(str(workshop.checkpoint("gpt2")))
    _, _, bits = next(outrider_models(checkpoint, None, [], Clock()))
    assert 8.5 <= bits < 9


def test_encoder_decoders_are_refused(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SUITE.main(["--model", str(workshop.checkpoint("t5"))]) == EXIT_STATUS["option"]
    assert "is an encoder-decoder" in error_line(capsys.readouterr().err, "option")
