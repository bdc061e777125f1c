"""The benchmark itself, on shapes so small that its figures mean nothing."""

import json
from dataclasses import replace

import pytest

from bench import decode
from bench.timing import Sample, figure

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_figure_leaves_disturbed_samples_out():
    quiet = [Sample(0.010 + i * 1e-5) for i in range(9)]
    mixed = figure([*quiet, *[Sample(0.5, lost=0.9)] * 20])
    assert mixed.ms == pytest.approx(10.04)
    assert (mixed.kept, mixed.taken) == (9, 29)


def test_a_figure_of_a_busy_machine_takes_the_least_disturbed_and_says_so():
    busy = figure([Sample(0.02, lost=0.1 + i / 100) for i in range(20)])
    assert busy.kept == 0
    assert "disturbed" in str(busy)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    scale = replace(decode.TINY, rounds=2)
    return decode.run(scale, tmp_path_factory.mktemp("bench"), 1, None)


def test_the_json_line_has_every_section(tiny):
    assert json.loads(json.dumps(tiny)) == tiny
    sections = ("bandwidth", "plain", "verify", "text_length", "host_share", "memory", "load")
    assert not [name for name in sections if name not in tiny]
    assert set(tiny["machine"]["versions"]) >= {"python", "numpy", "onnxruntime", "torch"}
    assert list(tiny["verify"]) == [str(n) for n in decode.WIDTHS]
    assert tiny["verify"]["1"]["ratio"] == 1
    assert tiny["plain"]["floor_ms"] > 0
    assert tiny["plain"]["ratio"] > 0
    assert tiny["draft_step"]["c"] > 0


def test_shares_are_parts_of_a_round(tiny):
    for case, result in tiny["host_share"].items():
        assert 0 <= result["host"] <= 1, case
        assert 0 < result["sampling"] < 1, case
        if "all accepted" in case:
            assert result["tau"] > 4.5, case  # gamma 4: five tokens in all rounds but the last


def test_the_json_line_names_no_machine_and_no_path(tiny, tmp_path_factory):
    text = json.dumps(tiny)
    assert str(tmp_path_factory.getbasetemp()) not in text
    assert "/" not in json.dumps(tiny["machine"])
