"""A control for each rule of `make map`, which `make check` applies to the checkout.

That correct code passes is shown by the checkout itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from house import CHECKOUT, LADDERS, MOST_COLUMNS, MOST_MODULES, Room, text_faults
from rounds import cases
from workshop import Workshop


def room(root: Path, name: str, **sources: str) -> Room:
    """Write a room; in the names of its modules __ stands for a slash."""
    for module, source in sources.items():
        path = root / name / (module.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return Room(root, name)


@pytest.mark.parametrize(
    ("sources", "fault"),
    [
        ({"files__a": "from ..decoder import x", "decoder": ""}, "files imports decoder"),
        # An import inside a function counts too.
        ({"files__a": "def f():\n    from ..decoder import x", "decoder": ""}, "files imports"),
        ({"files__a": "from .. import decoder", "decoder": ""}, "files imports decoder"),
        ({"cellar": ""}, "cellar: has no place on the ladder"),
        ({"gpu__a": "from .. import decoder", "decoder": "from .gpu.a import x"}, "a circle: "),
        ({"gpu__a": "class A: ...", "text__b": "class A: ..."}, "class A is defined in"),
        ({f"gpu__m{i}": "" for i in range(MOST_MODULES + 1)}, f"{MOST_MODULES + 1} modules"),
        ({f"gpu__loop_{i}": "" for i in range(3)}, "3 modules begin with loop_"),
    ],
)
def test_control_each_rule_is_noticed(tmp_path: Path, sources: dict[str, str], fault: str) -> None:
    assert any(fault in found for found in room(tmp_path, "runtime", **sources).faults())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("export", "from runtime.bundle import load"),
        ("export", "from runtime import load"),
        ("export", "import runtime"),
        ("export", "def f():\n    from engines.bundle import build"),
        ("export", "import onnxruntime"),  # only lazily
        ("engines", "from ..export import part"),
        ("engines", "def f():\n    import onnxscript"),
        ("runtime/text", "import torch"),
        ("runtime/text", "def f():\n    import transformers"),
        ("runtime/text", "class A:\n    import onnxruntime"),
        ("runtime/text", "if True:\n    from tensorrt_rtx import Builder"),
        ("runtime/text", "if CHECKING:\n    import torch"),
        ("runtime/text", "from runtime.bundle import load"),  # the package is installed as outrider
        ("runtime/text", "from outrider import errors"),
        ("runtime/text", "from ... import export"),
        ("runtime/text", "import psutil"),
    ],
)
def test_control_imports_from_outside_are_noticed(tmp_path: Path, path: str, source: str) -> None:
    name, *deeper = path.split("/")
    faults = list(room(tmp_path, name, **{"__".join((*deeper, "a")): source}).faults())
    assert len(faults) == 1 and f"{path}/a.py:" in faults[0] and "may not import" in faults[0]


def test_a_circle_in_a_room_without_a_ladder(tmp_path: Path) -> None:
    assert "export" not in LADDERS
    circle = room(tmp_path, "export", a="from .b import x", b="from .a import y")
    assert [fault.split(":")[1].strip() for fault in circle.faults()] == ["a circle"]


def test_control_long_files_and_wide_lines(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text("word\n" * 1201)
    (tmp_path / "runtime" / "round.py").write_text("pass\n" * 151)
    wide = "x" * (MOST_COLUMNS + 1)
    (tmp_path / "README.md").write_text(f"{wide}\n| {wide} |\n")
    assert list(text_faults(tmp_path)) == [
        "runtime/round.py: 151 lines, at most 150",
        "docs/architecture.md: 1201 words, at most 1200",
        f"README.md:1: {MOST_COLUMNS + 1} columns",
    ]


GENERATE = """
import sys
import runtime
print(not {"onnxruntime", "torch"} & set(sys.modules))
runtime.load(sys.argv[1]).generate([5, 6, 7], max_new_tokens=8)
forbidden = set(sys.argv[2:])
print(*forbidden & set(sys.modules))
import onnx
print(*forbidden & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("backend", "other"), cases([("onnxruntime", "torch")], [("aotinductor", "onnxruntime")])
)
def test_generating_loads_no_model_library(workshop: Workshop, backend: str, other: str) -> None:
    """Not even indirectly. The control imports onnx, which must be detected."""
    bundle = workshop.bundle(*workshop.pair(backend), backend=backend)
    forbidden = ["torch._inductor", "transformers", "onnx", "onnxscript", "onnx_ir", "export",
                 "engines", other]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", GENERATE, bundle, *forbidden], cwd=CHECKOUT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.splitlines() == ["True", "", "onnx"]
