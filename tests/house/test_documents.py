"""Everything that the documents show exists and runs: commands with their options, variables and
tests; files, links, snippets. Nothing is listed twice: make and argparse check the commands."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from itertools import pairwise, starmap, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from commands import CHECKOUT
from test_makefile import checkout, make  # noqa: F401 (a fixture)

from plugins.tools.build import PLUGINS_FOLDER, find_compiler
from runtime.cmake import onnxruntime
from runtime.files.library import find_library

if TYPE_CHECKING:
    from workshop import Workshop

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")

PAST = {CHECKOUT / "CHANGELOG.md", CHECKOUT / "docs" / "LOG.md"}  # their commands may be gone
OTHERS = re.compile(r"\..*|build|dist|.*\.egg-info")
ROOMS = [path for path in CHECKOUT.iterdir() if path.is_dir() and not OTHERS.fullmatch(path.name)]
INSIDE = {path for room in ROOMS for path in room.rglob("*.*")}
DOCUMENTS = sorted({*CHECKOUT.glob("*.md"), *(p for p in INSIDE if p.suffix == ".md")} - PAST)
GENERATE = ("-m", "runtime.generate")
FILE = re.compile(rf"({'|'.join(room.name for room in ROOMS)})/[\w./-]*")
ASSIGNED = re.compile(r"[A-Z][A-Z_]+=")
PROGRAM = re.compile(r"(\.venv/bin/)?(make|python3?|pytest|outrider|pip)(?= |$)|--\w|[A-Z][A-Z_]+=")
CHEAP = re.compile(
    r"(\.venv/bin/)?(outrider|python -m (runtime|outrider)\.\S+|cmake|build/\w+/\w+) "
)
NUMBER = re.compile(r"(\d[\d.,]*|\.\d+)( m?s\b)?")


def lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Number, kind and text of each line. Kind: "" for prose, "shell" for indented lines, otherwise
    the fence's language. Shell lines that end in a backslash are joined."""
    fence, first, joined = "", 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            fence = "" if fence else line[3:].strip() or "shell"
            continue
        kind = fence or ("shell" if line.startswith("    ") else "")
        first = first or number
        joined += line.strip().removeprefix("$ ") if kind == "shell" else line
        if kind == "shell" and joined.endswith("\\"):
            joined = joined[:-1]
        else:
            yield first, kind, joined
            first, joined = 0, ""


class Parsed(BaseException):
    """Raised when parsing succeeds, in place of running the command."""


@cache
def parser_error(*words: str) -> str:
    """The error of the parser of `python WORDS`, or "". Required arguments may be missing."""
    module = words[0] == "-m"
    name, given = words[module], words[module + 1 :]
    parse = ArgumentParser.parse_args

    def stop(parser: ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        for part in (*parser._actions, *parser._mutually_exclusive_groups):
            part.required = False
        parse(parser, args, namespace)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()):
        patch.setattr(ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [name, *given])
        patch.setattr(sys, "path", [str((CHECKOUT / name).parent), *sys.path][module:])
        try:
            with redirect_stderr(StringIO()) as stderr:
                run = runpy.run_module if module else runpy.run_path
                run(name if module else str(CHECKOUT / name), run_name="__main__")
        except Parsed:
            return ""
        except SystemExit as error:
            return stderr.getvalue().strip() if error.code else ""  # --help
        except (ImportError, OSError) as error:
            return str(error)
    return f"{name} parses nothing"


def selection_error(words: list[str]) -> str:
    """An error if pytest would find no tests, judged from the files' text, since collecting them
    takes half a minute."""
    files = [CHECKOUT / word for word in words if word.startswith("tests")]
    tests = [test for one in files for test in (one.rglob("test_*.py") if one.is_dir() else [one])]
    text = "".join(test.read_text() for test in tests if test.is_file())
    there = {"-k": " ".join(re.findall(r"(?:def|class) (test\w+)", text, re.IGNORECASE)),
             "-m": " ".join(re.findall(r"mark\.(\w+)", text))}  # fmt: skip
    for flag, wanted in pairwise(words):
        for word in re.findall(r"\w+", wanted) if flag in there else ():
            if word not in ("and", "or", "not") and word not in there[flag]:
                return f"{flag} {word} selects none"
    return ""


@cache
def make_error(stub: Path, *words: str) -> str:
    """make's error for these targets and variables, or "". For `make engines` also the errors of
    the commands that it would run."""
    if "engines" not in words:
        status, _, stderr = make(stub, "-n", *words)
        return stderr.strip() if status else ""
    status, ran, stderr = make(stub, "MODEL=m", *words)
    return stderr.strip() if status else next(filter(None, starmap(parser_error, ran)), "")


def fault(words: list[str], known: list[tuple[str, ...]], stub: Path) -> str:
    """The error of this command, or "". known: the document's earlier commands, to one of which an
    option that is shown without a command must belong."""
    names = [word.partition("=")[0] for word in takewhile(ASSIGNED.match, words)]
    program, *rest = words[len(names) :] or [""]
    program = Path(program).name
    variables = re.findall(r"^(\w+) \?=", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    if not program and {*names} <= {*variables}:
        program, rest, names = "make", ["engines", *words], []
    sources = (path for path in INSIDE if names and path.suffix in (".py", ".cpp", ".h"))
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    if unread := [name for name in names if f'"{name}"' not in code]:
        return f"nothing reads {unread[0]}"
    if program == "make":
        return make_error(stub, *rest)
    if program == "pytest" or rest[:2] == ["-m", "pytest"]:
        return selection_error(rest)
    if program == "pip" or rest[:2] == ["-m", "pip"]:
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        extras = re.findall(r"(?:^|\s)(?:\.|\S*outrider-\S*)\[([\w,]+)\]", " ".join(rest))
        missing = {*",".join(extras).split(",")} - {"", *project["optional-dependencies"]}
        return f"there is no extra {missing}" if missing else ""
    if program.startswith("--"):
        errors = [parser_error(*start, *words) for start in (GENERATE, *known)]
        alone = len(words) == 1 and any("expected one argument" in one for one in errors)
        return "" if alone or "" in errors else f"no command before takes {' '.join(words)}"
    rest = [*GENERATE, *rest] if program == "outrider" else rest
    known.append((*takewhile(lambda word: word[:2] != "--", rest),))
    return parser_error(*rest) if rest[:1] not in ([], ["-c"]) else ""


def faults(path: Path, stub: Path) -> Iterator[str]:
    text, known = [*lines(path.read_text(encoding="utf-8"))], list[tuple[str, ...]]()
    prose = "\n".join("" if kind else line for _, kind, line in text)

    def number(found: re.Match[str]) -> int:
        return text[prose.count("\n", 0, found.start())][0]

    shown = [(place, line) for place, kind, line in text if kind == "shell"]
    quoted = re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose)
    shown += [(number(found), " ".join(found[1].split())) for found in quoted]
    for place, command in sorted(shown, key=lambda one: one[0]):
        words = command.split()
        if PROGRAM.match(command):
            words = shlex.split(re.sub(r" …(?= |$)", "", command), comments=True)
            words = [re.sub(r"(?<=\w)(\||\.\.).*", "", word) for word in words]  # first of a choice
            words = [*takewhile(lambda word: word not in (">", "|", "&&"), words)]
            if error := fault(words, known, stub):
                yield f"{path.name}:{place}: {command}: {error}"
        for word in words:
            if FILE.fullmatch(word) and not (CHECKOUT / word).exists():
                yield f"{path.name}:{place}: there is no {word}"
    for found in re.finditer(r"\]\((?!https?:)([^)\s#]*)#?([^)\s]*)\)", prose):
        other = path.parent / found[1] if found[1] else path
        page = other.read_text() if other.suffix == ".md" and other.exists() else ""
        titles = re.findall(r"(?m)^#+ (.*)", page)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        if not other.exists() or found[2] not in {"", *slugs}:
            yield f"{path.name}:{number(found)}: {found[0][2:-1]} leads nowhere"


def test_what_they_show_is_there(checkout: Path) -> None:  # noqa: F811
    assert [error for path in DOCUMENTS for error in faults(path, checkout)] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("`make demos`", "No rule to make target"),
        ("    make report ENGINE=build/demo", "there is no variable ENGINE"),
        ("Or `WEIGHTS=int9`.", "invalid choice: 'int9'"),
        ("`WIDTH=3 pytest tests/bits`", "nothing reads WIDTH"),
        ("    $ outrider --engines build/demo \\\n      --temprature 1", "--temprature"),
        ("`outrider --gamma often`", "--gamma"),
        ("`--gama 4`", "takes --gama 4"),
        ("`python -m bench sides`", "there is no suite sides"),
        ("`python -m bench kernel`, then `--alpha 0.9`", "takes --alpha 0.9"),
        ("`python -m export.ngrams`", "No module named export.ngrams"),
        ("`.venv/bin/python models/train.py --smok 1`", "--smok 1"),
        ("`pytest -m slow tests/bits -k your_one`", "-k your_one selects none"),
        ("`pytest tests/bit`", "there is no tests/bit"),
        ("`pip install '.[gpus]'`", "there is no extra {'gpus'}"),
        ("See `runtime/rounds.py`.", "there is no runtime/rounds.py"),
        ("[there](nowhere.md)", "nowhere.md leads nowhere"),
        ("[there](#below)", "#below leads nowhere"),
    ],
)
def test_control_what_is_not_there_is_told(
    line: str, message: str, tmp_path: Path, checkout: Path  # noqa: F811
) -> None:  # fmt: skip
    (tmp_path / "page.md").write_text(f"# Page\n\nA fine `make test`.\n\n{line}\n")
    [found] = faults(tmp_path / "page.md", checkout)
    assert found.startswith("page.md:5: ") and message in found


def blocks(language: str) -> list[Any]:
    """The documents' code blocks in a language, as parameters with their places as ids."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for block in re.finditer(rf"(?ms)^```{language}\n(.*?)^```", text):
            place = f"{path.name}:{text.count(chr(10), 0, block.start()) + 1}"
            found.append(pytest.param(block[1], id=place))
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str, llama_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", code.replace("build/demo", str(llama_bundle))]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout.strip()


@pytest.fixture
def house(tmp_path: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which the demo has been built, with the environment's programs in PATH."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "build").mkdir()
    for place in CHECKOUT.iterdir():
        if place.name != "build":
            (tmp_path / place.name).symlink_to(place)
    models = CHECKOUT / "models"
    bundle = workshop.bundle(models / "target", models / "draft", max_len=2048, measure=True)
    for name, place in (("demo", bundle), ("target", bundle), ("lib", CHECKOUT / "build" / "lib")):
        (tmp_path / "build" / name).symlink_to(place)
    return tmp_path


def mismatches(path: Path, house: Path) -> Iterator[str]:
    """Run a document's cheap commands. Yields those that fail, and the lines of shown output that
    they do not print; numbers may differ."""
    output: list[str] | None = None
    for number, kind, line in lines(path.read_text(encoding="utf-8")):
        bundles = re.findall(r"--engines (\S+)", line)
        if kind == "shell" and CHEAP.match(line) and all((house / x).exists() for x in bundles):
            run = ["bash", "-c", line]
            done = subprocess.run(run, cwd=house, capture_output=True, text=True)
            output = [*map(str.strip, NUMBER.sub("#", done.stdout + done.stderr).splitlines())]
            if done.returncode:
                yield f"{path.name}:{number}: {line}: {done.stderr}"
        elif kind != "shell" or PROGRAM.match(line):
            output = None
        elif output is not None and line != "…" and NUMBER.sub("#", line) not in output:
            yield f"{path.name}:{number}: {line}: is not printed"


@pytest.mark.slow
def test_cheap_commands_run(house: Path) -> None:
    assert [error for path in DOCUMENTS for error in mismatches(path, house)] == []
    # Faults: the examples did not configure for months; a summary was shown with other words.
    page = house / "page.md"
    page.write_text("""
    cmake -S examples -B build/embed -Doutrider_DIR=none

    $ outrider --engines build/demo --prompt a --max-new-tokens 2
    …
    output 3 tok | 9.9 tok/s | TPOT 12 ms | finish eos
""")
    configured, printed = mismatches(page, house)
    assert configured.startswith("page.md:2: cmake") and "outrider" in configured
    assert printed.startswith("page.md:6: output 3 tok") and printed.endswith("is not printed")


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("cpp"))
def test_cpp_runs(code: str, house: Path) -> None:
    (house / "page.cpp").write_text(code)
    library = find_library()
    assert library is not None
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{PLUGINS_FOLDER / 'include'}"]
    link = [library, f"-Wl,-rpath,{library.parent}", "-o", "page"]
    subprocess.run([*find_compiler(), *flags, "page.cpp", *link], cwd=house, check=True)
    done = subprocess.run(["./page", onnxruntime()], cwd=house, capture_output=True, check=True)
    assert done.stdout
