"""`make map`'s rules: the checkout keeps them, and each has a control that breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest
from house import LADDERS, MOST_COLUMNS, MOST_MODULES, ROOMS, Room, main, text_faults


def room(root: Path, name: str, **sources: str) -> Room:
    """A room whose modules are named with __ for a slash."""
    for module, source in sources.items():
        path = root / name / (module.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return Room(root, name)


def test_the_house_keeps_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    status = main()
    said = capsys.readouterr()
    assert (status, said.err) == (0, "")
    assert all(f"{name}/  " in said.out for name in ROOMS)


@pytest.mark.parametrize(
    ("sources", "fault"),
    [
        ({"files__a": "from ..decoder import x", "decoder": ""}, "files imports decoder"),
        # An import inside a function is an arrow too.
        ({"files__a": "def f():\n    from ..decoder import x", "decoder": ""}, "files imports"),
        ({"files__a": "from .. import decoder", "decoder": ""}, "files imports decoder"),
        ({"cellar": ""}, "cellar: has no place on the ladder"),
        (
            {"gpu__a": "from .. import decoder", "decoder": "from .gpu.a import x"},
            "a circle: ",
        ),
        ({"gpu__a": "class A: ...", "text__b": "class A: ..."}, "class A stands in"),
        ({f"gpu__m{i}": "" for i in range(MOST_MODULES + 1)}, f"{MOST_MODULES + 1} modules"),
        ({f"gpu__loop_{i}": "" for i in range(3)}, "3 modules begin with loop_"),
    ],
)
def test_control_each_rule_is_noticed(tmp_path: Path, sources: dict[str, str], fault: str) -> None:
    assert any(fault in said for said in room(tmp_path, "runtime", **sources).faults())


def test_control_a_room_that_keeps_them(tmp_path: Path) -> None:
    made = room(
        tmp_path, "runtime", __init__="from .decoder import x", files__a="class A: ...",
        decoder="from .files.a import A\nfrom .files import a",
        **{f"gpu__m{i}": "from ..decoder import x" for i in range(MOST_MODULES)},
    )  # fmt: skip
    assert list(made.faults()) == []
    assert made.steps()["gpu"] == {"decoder"}
    assert made.steps()["decoder"] == {"files"}


def test_a_circle_in_a_room_without_a_ladder(tmp_path: Path) -> None:
    assert "export" not in LADDERS
    circle = room(tmp_path, "export", a="from .b import x", b="from .a import y")
    assert [said.split(":")[1].strip() for said in circle.faults()] == ["a circle"]


def test_control_long_files_and_wide_lines(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "round.py").write_text("pass\n" * 151)
    wide = "x" * (MOST_COLUMNS + 1)
    (tmp_path / "README.md").write_text(f"{wide}\n| {wide} |\n")
    assert list(text_faults(tmp_path)) == [
        "runtime/round.py: 151 lines, at most 150",
        f"README.md:1: {MOST_COLUMNS + 1} columns",
    ]
