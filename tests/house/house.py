"""The structure of the repository: rooms, lines, imports. `make map` prints it, and fails if a rule
is broken.

Imports go down the ladder and form no cycles. A room's imports from outside are listed in tables:
only `runtime/` is installed, and the rooms exchange files, not objects. A folder holds at most 12
modules, and three files with the same prefix must become a folder. Class names are unique within a
room. The round stays short, and so does docs/architecture.md. Lines of Markdown have at most 100
columns, except in tables.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
MOST_MODULES, MOST_COLUMNS = 12, 100
MOST_LINES = {"runtime/round.py": 150}
MOST_WORDS = {"docs/architecture.md": 1200}
# A name may not import a name to its right. Names are folders or modules.
LADDERS = {
    "runtime": [
        "files", "stats", "sampling", "backends", "slots", "gamma", "sequence", "calls",
        "drafts", "round", "checks", "decoder", "gpu", "audio", "text", "host", "bundle",
        "beam", "certificate", "theory", "cli", "generate", "cmake",
    ],
    "bench": ["core", "systems", "suites", "report"],
}  # fmt: skip
GPU = {"tensorrt", "tensorrt_rtx", "cuda"}
EXPORTING = {
    "torch", "transformers", "onnx", "onnx_ir", "onnxscript", "numpy", "huggingface_hub",
    "safetensors", "tokenizers",
}  # fmt: skip
# Third-party packages that a room may import anywhere, and those that it may import only in
# functions, because users of another backend do not have them.
OUTSIDE = {
    "runtime": (
        {"numpy", "tokenizers", "jinja2"},
        {"onnxruntime", "torch", "soundfile", "soxr", *GPU},
    ),
    "export": (EXPORTING, {"onnxruntime"}),
    "engines": (set[str](), {"onnxruntime", "onnx", "torch", "triton", *GPU}),
}
# Modules that are imported only in functions, and what they may therefore import anywhere.
LAZY = {"engines/aotinductor/attention.py": {"torch", "triton"}}
# Modules of other rooms that a room may import, by prefix.
SHARED = {"runtime": (), "export": ("runtime.files.", "runtime.drafts.tables"),
          "engines": ("runtime.files.",)}  # fmt: skip
ROOMS = ("runtime", "export", "engines", "plugins", "bench", "tests", "examples")
SOURCES = (".py", ".h", ".cuh", ".cpp", ".cu")
OPENINGS = ("__init__.py", "__main__.py", "conftest.py")  # not counted as modules of their folder


@dataclass(frozen=True)
class Import:
    """names: dotted alternatives: `from a import b` imports from a, or the module a.b."""

    line: int
    names: tuple[str, ...]
    relative: bool
    lazy: bool  # in a function, or only for type checking


@dataclass(frozen=True)
class Room:
    """A top-level folder of `root`."""

    root: Path
    name: str

    @cached_property
    def modules(self) -> list[Path]:
        """Every source file, relative to the room."""
        folder = self.root / self.name
        found = (path for path in folder.rglob("*") if path.suffix in SOURCES)
        return sorted(path.relative_to(folder) for path in found if "__pycache__" not in path.parts)

    def lines(self, module: Path) -> int:
        return len((self.root / self.name / module).read_text().splitlines())

    def tree(self, module: Path) -> ast.Module:
        return ast.parse((self.root / self.name / module).read_text(), str(module))

    @cached_property
    def folders(self) -> dict[Path, list[Path]]:
        """The modules of each folder, without OPENINGS."""
        found = defaultdict(list)
        for module in self.modules:
            if module.name not in OPENINGS:
                found[module.parent].append(module)
        return dict(found)

    @cached_property
    def arrows(self) -> dict[Path, set[Path]]:
        """The modules of the room that each Python module imports, lazily or not."""
        known = {".".join(module.with_suffix("").parts): module for module in self.modules}
        known |= {
            ".".join(module.parent.parts): module
            for module in self.modules
            if module.name == "__init__.py" and module.parent.parts
        }
        found: dict[Path, set[Path]] = {}
        for module in self.modules:
            if module.suffix == ".py":
                names = {
                    name.removeprefix(f"{self.name}.")
                    for imported in _imports(self.tree(module), (self.name, *module.parts[:-1]))
                    for name in imported.names
                    if name.startswith(f"{self.name}.")
                }
                found[module] = {known[name] for name in names if name in known} - {module}
        return found

    def forbidden_imports(self) -> Iterator[str]:
        """A line for each import that the tables forbid."""
        anywhere, lazily = OUTSIDE[self.name]
        for module in self.modules:
            if module.suffix == ".py":
                for found in _imports(self.tree(module), (self.name, *module.parts[:-1])):
                    top, last = found.names[0].split(".")[0], found.names[-1]
                    if found.relative:
                        allowed = top == self.name
                    elif top in (*ROOMS, "models", "outrider"):
                        allowed = any(name.startswith(SHARED[self.name]) for name in found.names)
                    else:
                        allowed = top in sys.stdlib_module_names or top in anywhere
                        allowed |= found.lazy and top in lazily
                        allowed |= top in LAZY.get(f"{self.name}/{module}", ())
                    if not allowed:
                        yield f"{self.name}/{module}:{found.line}: may not import {last}"

    def step(self, module: Path) -> str:
        """The module's name on the ladder: its folder, or the module itself."""
        return module.parts[0] if len(module.parts) > 1 else module.stem

    def steps(self) -> dict[str, set[str]]:
        """The imports between the steps of the ladder."""
        found: dict[str, set[str]] = {
            self.step(module): set() for module in self.modules if module.parts[0] not in OPENINGS
        }
        for module, imported in self.arrows.items():
            here = self.step(module)
            if here in found:
                found[here] |= {self.step(other) for other in imported} - {here, "__init__"}
        return found

    def faults(self) -> Iterator[str]:
        """A line for each rule that is broken."""
        if self.name in OUTSIDE:
            yield from self.forbidden_imports()
        ladder = LADDERS.get(self.name)
        steps = self.steps()
        if ladder is not None:
            rank = {step: i for i, step in enumerate(ladder)}
            for step in sorted(steps.keys() - rank.keys()):
                yield f"{self.name}/{step}: has no place on the ladder"
            for step, others in sorted(steps.items()):
                for other in sorted(others):
                    if rank.get(step, 0) < rank.get(other, 0):
                        yield f"{self.name}: {step} imports {other}, which is above it"
        try:
            TopologicalSorter(steps if ladder else self.arrows).prepare()
        except CycleError as error:
            yield f"{self.name}: a circle: " + " -> ".join(map(str, error.args[1]))
        for folder, modules in sorted(self.folders.items()):
            where = Path(self.name, folder)
            if len(modules) > MOST_MODULES:
                yield f"{where}: {len(modules)} modules, at most {MOST_MODULES}"
            prefixes = Counter(
                module.stem.split("_")[0] for module in modules if "_" in module.stem
            )
            for prefix, count in sorted(prefixes.items()):
                if count > 2 and prefix not in ("test", "outrider"):  # required prefixes
                    yield f"{where}: {count} modules begin with {prefix}_: make it a folder"
        classes = defaultdict(list)
        for module in self.modules:
            if module.suffix == ".py" and self.name not in ("tests", "examples"):
                for node in self.tree(module).body:
                    if isinstance(node, ast.ClassDef):
                        classes[node.name].append(str(module))
        for name, places in sorted(classes.items()):
            if len(places) > 1:
                yield f"{self.name}: class {name} is defined in {' and '.join(places)}"

    def drawing(self) -> Iterator[str]:
        """The room as lines of text: folders and modules with their line counts and imports."""
        total = sum(map(self.lines, self.modules))
        yield f"{self.name}/  {total:,} lines"
        steps = self.steps()
        order = LADDERS.get(self.name) or sorted(steps)
        for step in sorted(steps, key=lambda s: order.index(s) if s in order else -1):
            inside = [module for module in self.modules if self.step(module) == step]
            lines = sum(map(self.lines, inside))
            yield f"  {lines:>6,}  {step:<12} {self.purpose(inside)}".rstrip()
            if steps[step]:
                yield f"          imports {' '.join(sorted(steps[step]))}"
            if names := [name for module in inside if (name := _shown(module))]:
                yield f"          holds   {' '.join(names)}"

    def purpose(self, modules: list[Path]) -> str:
        """The purpose of a step: the first sentence of its module's or package's docstring."""
        first = next((m for m in modules if m.name == "__init__.py"), modules[0])
        docstring = ast.get_docstring(self.tree(first)) if first.suffix == ".py" else None
        if docstring is None or (len(modules) > 1 and first.name != "__init__.py"):
            return ""
        paragraph = docstring.split("\n\n")[0].replace("\n", " ")
        return re.split(r"(?<! al)\. ", paragraph)[0].rstrip(".")


def _shown(module: Path) -> str:
    """The name of a module inside a folder; with its suffix unless that is .py."""
    inside = Path(*module.parts[1:])
    if inside.name in ("", "__init__.py"):
        return ""
    return str(inside.with_suffix("") if inside.suffix == ".py" else inside)


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[Import]:
    """The imports of a module in this package, whose first part is the room."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, (alias.name,), False, lazy)
        elif isinstance(node, ast.ImportFrom):
            # A relative import that leaves the room has no package left.
            above = package[: max(0, len(package) - node.level + 1)] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            for alias in node.names:
                names = (base, f"{base}.{alias.name}")
                yield Import(node.lineno, names, node.level > 0, lazy)
        lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lazy |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy)

    yield from walk(tree, False)


def text_faults(root: Path) -> Iterator[str]:
    """A line for each file that is too long or too wide."""
    for name, most in MOST_LINES.items():
        if (root / name).is_file() and (
            count := len((root / name).read_text().splitlines())
        ) > most:
            yield f"{name}: {count} lines, at most {most}"
    for name, most in MOST_WORDS.items():
        if (root / name).is_file() and (count := len((root / name).read_text().split())) > most:
            yield f"{name}: {count} words, at most {most}"
    for path in sorted((*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("models/*.md"))):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if len(line) > MOST_COLUMNS and not line.startswith(("|", "![", "<")):
                yield f"{path.relative_to(root)}:{number}: {len(line)} columns"


def main(root: Path = CHECKOUT) -> int:
    rooms = [Room(root, name) for name in ROOMS if (root / name).is_dir()]
    faults = list(text_faults(root))
    for room in rooms:
        print("\n".join(room.drawing()), end="\n\n")
        faults += room.faults()
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
