"""Compile liboutrider: `python -m plugins.tools.build [--out build/lib]`.

The compiler is $CXX, g++ or clang++. The inner loops are compiled once per instruction set and
selected at run time, so the library runs on every machine of the same architecture (x86-64, ARM64).
Its file name contains a digest of its inputs (sources, flags, compiler). It is compiled only if it
does not exist and moved into place atomically; `liboutrider.so` is a link to it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

PLUGINS_FOLDER = Path(__file__).resolve().parents[1]
INCLUDE_FOLDERS = ("include", "core", "cpu", "cuda", "onnxruntime")  # on the include path
FOLDERS = (*INCLUDE_FOLDERS, "files", "engines", "session")
NAME = "liboutrider.so"
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden",
    # For reproducible bits: fuse operations only where the source does.
    "-ffp-contract=off",
    # For speed: errno and floating-point exceptions are not used; values are unaffected.
    "-fno-math-errno", "-fno-trapping-math",
]  # fmt: skip
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wno-sign-conversion", "-Wshadow"]
Unit = tuple[str, list[str]]  # a source and its own flags
# By architecture: the flags of every file, and the instruction sets of the loops.
BASE_FLAGS = {
    "x86_64": ["-DOUTRIDER_X86", "-march=x86-64-v2", "-mtune=generic"],
    "aarch64": ["-DOUTRIDER_ARM", "-march=armv8-a"],
}
AVX2 = ["-mavx2", "-mfma", "-mtune=generic"]
AVX512 = [*(f"-mavx512{x}" for x in ("f", "bw", "dq", "vl")), "-mfma", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {"x86_64": {"avx2": AVX2, "avx512": AVX512}}
# Quantised products use additional instruction sets.
PRODUCT_SETS = {
    "x86_64": {
        "avx2": [*AVX2, "-mf16c"],
        "avxvnni": [*AVX2, "-mf16c", "-mavxvnni"],
        "avx512vnni": [*AVX512, "-mavx512vnni"],
    },
    "aarch64": {"dotprod": ["-march=armv8.2-a+dotprod"]},
}
LOOP_SOURCES = [
    ("cpu/outrider_tiles.cpp", "tiles", INSTRUCTION_SETS, []),
    ("onnxruntime/outrider_attention.cpp", "attention", INSTRUCTION_SETS, []),
    ("onnxruntime/outrider_attention.cpp", "attention_int8", INSTRUCTION_SETS, ["-DOUTRIDER_INT8"]),
    ("onnxruntime/outrider_product.cpp", "product", PRODUCT_SETS, []),
    ("onnxruntime/outrider_recurrence.cpp", "recurrence", INSTRUCTION_SETS, []),
]
OPERATOR_SOURCES = ("operator", "attend", "multiply", "recur")
SESSION_SOURCES = (
    *(f"files/{name}.cpp" for name in ("json", "sha256", "bundle")),
    *(f"engines/{name}.cpp" for name in ("engine", "ort_model", "host_engine", "device_engine")),
    *(f"session/{name}.cpp" for name in ("drafts", "checks", "decoder", "session")),
)  # fmt: skip
EXIT_STATUS = {"backend": 8, "disk": 12}  # runtime/files/errors.py


class BuildError(Exception):
    """A failed build. The text is one line with cause and remedy, for NVRTC also its log."""

    def __init__(self, text: str, kind: str = "backend"):
        super().__init__(text)
        self.kind = kind


def find_compiler() -> list[str]:
    """The C++ compiler's command. Raises BuildError if there is none."""
    try:
        command = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX cannot be read ({error}). Set CXX to a C++17 compiler.") from None
    if command:
        if shutil.which(command[0]):
            return command
        raise BuildError(f"CXX={command[0]} was not found. Set CXX to a C++17 compiler.")
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler was found. Install g++ or clang++, or set CXX.")


def units(machine: str, *, session: bool) -> list[Unit]:
    """The library's sources with their flags. session: include that of outrider_session.h."""
    kind = BASE_FLAGS.get(machine, [])
    return [
        ("cpu/outrider_cpu.cpp", [*kind, "-pthread"]),
        ("cpu/outrider_rounding.cpp", [*kind, "-pthread"]),
        ("cpu/outrider_softmax.cpp", kind),
        *((source, [*kind, "-pthread"]) for source in SESSION_SOURCES if session),
        *((f"onnxruntime/outrider_{name}.cpp", kind) for name in OPERATOR_SOURCES),
        *(
            (source, [f"-DOUTRIDER_TABLE=outrider_{table}_{name}", f'-DOUTRIDER_SET="{name}"',
                      *more, *own])
            for source, table, sets, more in LOOP_SOURCES
            for name, own in {"plain": kind, **sets.get(machine, {})}.items()
        ),
    ]  # fmt: skip


def include_options(sources: Path = PLUGINS_FOLDER) -> list[str]:
    """The compiler's include options."""
    return [f"-I{sources}", *(f"-I{sources / folder}" for folder in INCLUDE_FOLDERS)]


def headers(sources: Path = PLUGINS_FOLDER) -> list[Path]:
    """Every file that a source may include, and the sources in the same folders."""
    found = (path for folder in FOLDERS for path in (sources / folder).iterdir())
    return [path for path in found if path.suffix in (".h", ".hpp", ".cuh", ".cpp", ".cu", ".map")]


def build(
    out: Path, sources: Path = PLUGINS_FOLDER, extra: Sequence[str] = (), *, session: bool = True
) -> Path:
    """Compile the library unless it exists; returns its path, `out`/liboutrider.so.

    sources: the folder of the sources (in tests, a modified copy). extra: more compiler flags.
    session: include the session of outrider_session.h. Raises BuildError.
    """
    exports = PLUGINS_FOLDER / "session" / "exports.map"
    flags = ["-shared", f"-Wl,-soname,{NAME}", f"-Wl,--version-script={exports}", *extra]
    library = _compile_library(out, "liboutrider", ".so", sources, flags, [], session=session)
    return link(out / NAME, library)


def build_emulated(out: Path) -> Path:
    """Compile the CUDA kernels for the host. Raises BuildError."""
    # FMA, as on a GPU. Warnings of CUDA sources are disabled: nvcc reports them.
    flags = ["-mfma", "-mavx2"] if platform.machine() == "x86_64" else []
    # setjmp switches between stacks, and kernels read memory as words.
    flags += ["-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
    jobs = [("cuda/emulate.cpp", [*flags, "-Wno-unknown-pragmas", "-Wno-subobject-linkage"])]
    return build_cached(out, "emulated", ".so", jobs, ["-shared"], headers())


def build_fuzz(
    out: Path, sources: Path = PLUGINS_FOLDER, extra: Sequence[str] = (), *, session: bool = False
) -> Path:
    """Compile fuzz.cpp or fuzz_session.cpp with the library's sources. Raises BuildError."""
    name = "fuzz_session" if session else "fuzz"
    more: list[Unit] = [(f"tools/{name}.cpp", [])]
    return _compile_library(out, name, "", sources, list(extra), more, session=session)


def _compile_library(
    out: Path, name: str, suffix: str, sources: Path, extra: list[str], more: list[Unit],
    *, session: bool,
) -> Path:  # fmt: skip
    """Compile the library's sources and `more`."""
    jobs = [*units(platform.machine(), session=session), *more]
    input_files = (*headers(sources), *(sources / source for source, _ in more))
    return build_cached(out, name, suffix, jobs, extra, input_files, sources)


def build_cached(
    out: Path, name: str, suffix: str, jobs: Sequence[Unit], extra: Sequence[str],
    input_files: Iterable[Path], sources: Path = PLUGINS_FOLDER,
) -> Path:  # fmt: skip
    """Compile and link sources into a file named by a digest of the inputs, unless it exists.
    input_files: the files that the compiler reads. Raises BuildError."""
    compiler = find_compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256(version.encode() + repr((compiler, jobs, FLAGS, extra)).encode())
    for path in sorted(input_files):
        digest.update(path.name.encode() + path.read_bytes())
    made = out / f"{name}-{digest.hexdigest()[:16]}{suffix}"
    if not made.is_file():
        print(f"compile {name} with {' '.join(compiler)}", file=sys.stderr)
        with temporary_folder(out, name) as folder:
            os.replace(_compile(compiler, jobs, sources, extra, folder), made)
    return made


@contextmanager
def temporary_folder(out: Path, name: str) -> Iterator[Path]:
    """A temporary folder in `out`. Raises BuildError if it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}-") as folder:
            yield Path(folder)
    except OSError as error:
        cause = f"{out} cannot be written ({error.strerror})"
        raise BuildError(f"{cause}. Make room there, or choose another --out.", "disk") from None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically, so that a reader sees the old or the new one. Raises BuildError."""
    with temporary_folder(path.parent, path.name) as folder:
        fresh = folder / path.name
        fresh.write_bytes(data)
        os.replace(fresh, path)


def _compile(
    compiler: list[str], jobs: Sequence[Unit], sources: Path, extra: Sequence[str], folder: Path
) -> Path:
    objects = [folder / f"{i}.o" for i in range(len(jobs))]
    common = [*FLAGS, *WARNINGS, *include_options(sources)]
    flags = [flag for flag in extra if flag != "-shared" and not flag.startswith("-Wl,")]
    commands = [
        [*compiler, *common, *own, *flags, "-c", str(sources / source), "-o", str(made)]
        for made, (source, own) in zip(objects, jobs, strict=True)
    ]

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        finished = list(pool.map(run, commands))
    for done in finished:
        if done.stdout:
            print(done.stdout, file=sys.stderr, end="")
        if done.returncode:
            cause = _first_error(done.stdout)
            raise BuildError(f"{compiler[0]} failed: {cause}. Use g++ 11 or clang++ 12, or newer.")
    made = folder / "made"
    command = [*compiler, "-pthread", *extra, *map(str, objects), "-ldl", "-o", str(made)]
    linked = subprocess.run(command, capture_output=True, text=True)
    if linked.returncode:
        raise BuildError(f"linking failed: {_first_error(linked.stderr)}. Check the compiler.")
    return made


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
    return lines[0].rstrip(".") if lines else "no message"


def link(path: Path, library: Path) -> Path:
    """Link `path` to the library atomically, so that a reader sees the old or the new one."""
    if not path.is_symlink() or os.readlink(path) != library.name:
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(library.name)
        os.replace(fresh, path)
    return path


def exit_status(work: Callable[[], object]) -> int:
    """Run `work`; returns the exit status, after printing one line if it failed."""
    try:
        work()
    except BuildError as error:
        print(f"error: {error.kind}: {error}", file=sys.stderr)
        return EXIT_STATUS[error.kind]
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile liboutrider.")
    lib = PLUGINS_FOLDER.parent / "build" / "lib"
    parser.add_argument("--out", type=Path, default=lib, help="output folder (default: build/lib)")
    parser.add_argument(
        "--optional",
        action="store_true",
        help="print little, and succeed without a compiler; the runtime then samples with NumPy",
    )
    arguments = parser.parse_args()
    if not arguments.optional:
        return exit_status(lambda: print(build(arguments.out)))
    try:
        build(arguments.out)
    except BuildError as error:
        print(f"note: without the native sampling kernel: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
