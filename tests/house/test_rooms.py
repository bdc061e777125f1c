"""The rooms keep apart: docs/architecture.md's table of who may import what, enforced.

What is installed is `runtime/` under another name, without torch, Transformers or ONNX; and the
rooms exchange files, not objects. Every rule has a control: a source tree that breaks it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import Workshop

CHECKOUT = Path(__file__).parents[2]
GPU_BACKENDS = frozenset({"tensorrt", "tensorrt_rtx", "cuda"})


FILES = frozenset(
    f"runtime.files.{path.stem}" for path in (CHECKOUT / "runtime" / "files").glob("*.py")
)


@dataclass(frozen=True)
class Room:
    """anywhere: third-party modules that it may import. lazily: those only inside functions, since
    a user of another backend does not have them. modules: of the other rooms."""

    anywhere: frozenset[str]
    lazily: frozenset[str] = frozenset({"onnxruntime", "torch"}) | GPU_BACKENDS
    modules: frozenset[str] = FILES


ROOMS = {
    "export": Room(
        frozenset(
            {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "numpy", "huggingface_hub"}
        ),
        modules=FILES | {"runtime.drafts.tables"},
    ),
    "engines": Room(frozenset(), lazily=frozenset({"onnxruntime", "onnx", "torch"}) | GPU_BACKENDS),
    "runtime": Room(frozenset({"numpy", "tokenizers", "jinja2"}), modules=frozenset()),
}
OUR_OWN = {*ROOMS, "plugins", "tests", "bench", "models", "outrider"}


@dataclass(frozen=True)
class Import:
    where: str  # file:line
    names: tuple[str, ...]  # absolute, of which one suffices: `from a import b` is a, or module a.b
    lazy: bool


def _imports(path: Path, root: Path) -> Iterator[Import]:
    """The absolute imports of a file; relative ones stay in the room."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(where, (alias.name,), lazy)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield Import(where, (node.module, f"{node.module}.{alias.name}"), lazy)
        elif isinstance(node, ast.ImportFrom) and node.level >= len(path.relative_to(root).parts):
            yield Import(where, ("a relative import beyond its room",), lazy)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inside |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text(), str(path)), False)


def violations(root: Path) -> list[str]:
    """One line for each import that the table forbids."""
    found = []
    for name, room in ROOMS.items():
        for path in sorted((root / name).rglob("*.py")):
            for imported in _imports(path, root):
                top = imported.names[0].split(".")[0]
                if top in OUR_OWN:
                    allowed = bool(room.modules & set(imported.names))
                else:
                    allowed = (
                        top in sys.stdlib_module_names
                        or top in room.anywhere
                        or (imported.lazy and top in room.lazily)
                    )
                if not allowed:
                    found.append(f"{imported.where}: {imported.names[-1]}")
    return found


def test_every_room_keeps_to_itself() -> None:
    assert all(list((CHECKOUT / room).glob("*.py")) for room in ROOMS)
    assert violations(CHECKOUT) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("export/a.py", "from runtime.bundle import load"),
        ("export/a.py", "from runtime import load"),
        ("export/a.py", "import runtime"),
        ("export/a.py", "def f():\n    from engines.bundle import build"),
        ("export/a.py", "import onnxruntime"),  # only lazily
        ("engines/a.py", "from runtime.decode import Decoder"),
        ("engines/a.py", "from export import part"),
        ("engines/a.py", "from ..export import part"),
        ("engines/a.py", "import onnxruntime"),
        ("engines/a.py", "import onnx"),
        ("engines/a.py", "def f():\n    import onnxscript"),
        ("engines/a.py", "import torch"),
        ("runtime/a.py", "import torch"),
        ("runtime/a.py", "def f():\n    import transformers"),
        ("runtime/a.py", "def f():\n    from onnx import helper"),
        ("runtime/a.py", "import onnxruntime as ort"),
        ("runtime/a.py", "class A:\n    import onnxruntime"),
        ("runtime/a.py", "if True:\n    from tensorrt_rtx import Builder"),
        ("runtime/a.py", "if CHECKING:\n    import torch"),
        ("runtime/a.py", "from runtime.bundle import load"),  # not what is installed
        ("runtime/a.py", "from outrider import errors"),
        ("runtime/a.py", "from .. import export"),
        ("runtime/deeper/a.py", "from ... import export"),
        ("runtime/a.py", "import psutil"),
    ],
)
def test_control_each_rule_catches_who_breaks_it(tmp_path: Path, path: str, source: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("export/a.py", "import json, torch\nfrom runtime.files.manifest import Pair"),
        ("export/a.py", "from runtime.files import manifest\nfrom .b import c"),
        ("engines/a.py", "def f():\n    import onnxruntime"),
        ("runtime/a.py", "import numpy as np\nfrom . import errors\nfrom .errors import x"),
        ("runtime/a.py", "class A:\n    def f(self):\n        import onnxruntime.quantization"),
        ("runtime/a.py", "if TYPE_CHECKING:\n    import torch"),
        ("runtime/deeper/a.py", "from ..errors import x"),
    ],
)
def test_what_the_table_allows(tmp_path: Path, path: str, source: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    assert violations(tmp_path) == []


FORBIDDEN = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "export", "engines")
GENERATE = """
import json, sys
import runtime
lazy = "onnxruntime" not in sys.modules
engine = runtime.load(sys.argv[1])
engine.generate([5, 6, 7], max_new_tokens=8)
{extra}
print(json.dumps([lazy, sorted(set(sys.argv[2].split(",")) & set(sys.modules))]))
"""


@pytest.mark.parametrize("extra", ["", "import onnx"])
def test_generating_loads_no_model_library(workshop: Workshop, extra: str) -> None:
    target, draft = workshop.checkpoint("llama"), workshop.checkpoint("llama", seed=7)
    bundle = workshop.bundle(target, draft)
    run = subprocess.run(
        [sys.executable, "-c", GENERATE.format(extra=extra), str(bundle), ",".join(FORBIDDEN)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    # With the extra import it is seen: the list of modules is looked at after everything ran.
    assert json.loads(run.stdout) == [True, ["onnx"] if extra else []]
