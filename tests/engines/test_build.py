"""What a machine has no room for is refused before minutes of work, on a processor too."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import MAX_LEN, Workshop
from commands import error_line

import engines.__main__
from engines import bundle as bundles
from engines.bundle import host_memory, memory_plan
from runtime.files.errors import EXIT_STATUS
from runtime.files.manifest import FIRST_ROWS, MOST_SLOTS, read_pair


@pytest.fixture(scope="module")
def graphs(workshop: Workshop) -> Path:
    source = workshop.checkpoint("llama", max_position_embeddings=4096)
    return workshop.graphs(source, max_len=None)


def command(graphs: Path, out: Path, slots: int) -> int:
    places = ["--graphs", str(graphs), "--out", str(out)]
    return engines.__main__.main([*places, "--slots", str(slots)])


@pytest.mark.parametrize("slots", [-1, 0, MOST_SLOTS + 1, 100_000_000])
def test_slots_that_no_machine_has(
    slots: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where `make engines` asks first: nothing is exported for them."""
    for more in (["--supports", "float32"], ["--graphs", str(tmp_path)]):
        status = engines.__main__.main([f"--slots={slots}", "--out", str(tmp_path / "out"), *more])
        assert status == EXIT_STATUS["option"]
        assert f"SLOTS={slots} is out of range" in error_line(capsys.readouterr().err, "option")


def test_memory_of_this_machine(
    graphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slots begin with few rows, so what would not open is refused, and what may not be filled is
    said."""
    pair = read_pair(graphs)
    assert pair.max_len > 4 * FIRST_ROWS > MAX_LEN
    least, most = (sum(memory_plan(pair, 2, rows).values()) for rows in (FIRST_ROWS, None))
    assert least < most

    def built(memory: int) -> tuple[int, str]:
        monkeypatch.setattr(bundles, "host_memory", lambda: memory)
        return command(graphs, tmp_path / "out", 2), capsys.readouterr().err

    status, err = built(least - 1)
    assert status == EXIT_STATUS["memory"]
    assert "the bundle needs" in error_line(err, "memory")
    assert not (tmp_path / "out").exists()
    status, err = built(most - 1)
    assert status == 0 and "not enough for 2 texts of 2048" in err
    for enough in (most, 0):  # 0: it does not say
        status, err = built(enough)
        assert status == 0 and "not enough" not in err


def test_this_machine_says_what_it_has() -> None:
    assert host_memory() > 2**28
