"""The session over TensorRT without TensorRT's library and without a GPU.

Its engine is built against the real headers if TENSORRT_ROOT is set, otherwise against a
stand-in's, and opened with stand-ins for the driver and TensorRT, which check their inputs.
This does not show that TensorRT does what its headers document, or how fast anything is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from commands import TENSORRT
from native_session import refused
from toy_model import compile_standins, make_bundle

from plugins.tools import build_tensorrt
from plugins.tools.build import find_compiler
from runtime.files.graphs import StateFacts
from runtime.files.library import find_library
from runtime.files.records import write_json

HERE = Path(__file__).parent
# Opens a bundle as a program does that has only the library.
OPEN_SCRIPT = """
import sys
from pathlib import Path
from runtime.files import library
library.FOLDERS = (Path(sys.argv[1]),)
from native_session import NativeSession
try:
    NativeSession(Path(sys.argv[2]))
except Exception as error:
    print(f"{error.kind}: {error.cause}: {error.remedy}")
"""


COMPILER_OUTPUT = StringIO()  # from building the engine


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    with redirect_stderr(COMPILER_OUTPUT):
        return compile_standins(tmp_path_factory.mktemp("standins"))


def test_as_python_says(environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider",
               HERE / "device_cases.py"]  # fmt: skip
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_it_compiles_without_a_warning(environment: Mapping[str, str]) -> None:
    expected = f"compile {build_tensorrt.ENGINE} with {find_compiler()[0]}\n"
    assert COMPILER_OUTPUT.getvalue() == expected
    made = Path(environment["STANDINS"]) / f"{build_tensorrt.ENGINE}.so"
    listed = [
        subprocess.run(["nm", "-D", f"--{which}-only", made], capture_output=True, text=True).stdout
        for which in ("defined", "undefined")
    ]
    assert listed[0].split()[2::3] == ["outrider_model_table"]
    assert not re.search(r" cu[A-Z]|nvinfer|_INTERNAL", listed[1])


def test_older_headers_make_no_engine(tmp_path: Path) -> None:
    """Older headers are enough for the plugin, but not for the engine."""
    path = tmp_path / "NvInferRuntime.h"
    path.write_text("class ICudaEngine;")
    assert not build_tensorrt.can_build_engine(tmp_path)
    assert build_tensorrt.can_build_engine(build_tensorrt.tensorrt_headers(TENSORRT))


def test_liboutrider_needs_none_of_it() -> None:
    library = find_library()
    assert library is not None
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert not re.search(r"NEEDED.*(nvinfer|cuda|engine)", needed.stdout)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("engine", r"backend: the bundle needs liboutrider_tensorrt_engine.so: .*: Compile it"),
        ("version", r"backend: .*engine.so belongs to another version of liboutrider: Compile it"),
        ("driver", r"backend: there is no CUDA driver: .*: Install NVIDIA's driver"),
    ],
)
def test_what_is_missing_is_named(
    missing: str, message: str, tmp_path: Path, environment: Mapping[str, str]
) -> None:
    """Runs with a copy of liboutrider's folder, where no stand-in is found."""
    library, own, driver = find_library(), tmp_path / "lib", tmp_path / "driver"
    assert library is not None
    own.mkdir()
    driver.mkdir()
    shutil.copy(library, own / "liboutrider.so")
    engine = own / f"{build_tensorrt.ENGINE}.so"
    if missing == "version":
        source = tmp_path / "other.c"
        source.write_text("const int *outrider_model_table(void) { static int v = 0; return &v; }")
        subprocess.run([*find_compiler(), "-x", "c", "-shared", "-fPIC", source, "-o", engine],
                       check=True)  # fmt: skip
    elif missing == "driver":
        shutil.copy(Path(environment["STANDINS"]) / engine.name, engine)
        (driver / "libcuda.so.1").write_text("no library")
    make_bundle(tmp_path / "bundle", slots=1)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_SCRIPT, own, tmp_path / "bundle"], cwd=HERE.parents[1],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver),
             "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and re.match(message, done.stdout), done.stdout + done.stderr
    assert done.stdout.count("\n") == 1


def test_caches_beyond_any_memory_are_refused(tmp_path: Path) -> None:
    """Sizes are checked before they are multiplied. Fault: the product overflowed 64 bits."""
    manifest = make_bundle(tmp_path, slots=1)
    shapes, capacity = [[2**16, 2**16]] * 2, 2**31 - 1
    models = {
        role: replace(facts, key_shapes=shapes, value_shapes=shapes, capacity=capacity)
        for role, facts in manifest.pair.models()
    }
    pair = replace(manifest.pair, **models, capacity=capacity)
    write_json(tmp_path / "manifest.json", "manifest", replace(manifest, pair=pair))
    refused(tmp_path, "bundle", "its caches are larger than any memory")


def test_a_recurrent_state_is_refused(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path, slots=1)
    target = replace(manifest.pair.target, states=StateFacts([[1, 4]], 12, 3))
    carrying = replace(manifest, pair=replace(manifest.pair, target=target))
    write_json(tmp_path / "manifest.json", "manifest", carrying)
    refused(tmp_path, "backend", "the target carries a recurrent state", "BACKEND=onnxruntime")
