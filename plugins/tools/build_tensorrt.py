"""Compile for TensorRT: `python -m plugins.tools.build_tensorrt --tensorrt-root <folder>`.

Compiles the plugin, and the engine that liboutrider loads for a session. Both need the headers of
TensorRT (<folder>/include) and CUDA, but not their libraries: they use no symbol of libnvinfer (the
linker verifies it) and load the CUDA driver at run time. The plugin contains its kernels as machine
code, so it needs no CUDA toolkit and no second CUDA runtime beside TensorRT's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from . import cubins
from .build import (
    PLUGINS_FOLDER,
    BuildError,
    build_cached,
    exit_status,
    headers,
    link,
    write_atomically,
)

PLUGIN, ENGINE = "liboutrider_tensorrt", "liboutrider_tensorrt_engine"
SOURCES = PLUGINS_FOLDER / "tensorrt"
ENGINE_SOURCES = PLUGINS_FOLDER / "engines" / "tensorrt"
MODULES = {"outrider": cubins.SOURCE, "outrider_tensorrt": SOURCES / "pack.cu"}
Images = dict[tuple[str, str], Path]  # files by (module, architecture as named in cubins.py)
# Undefined symbols are allowed only if the C and C++ libraries have them.
LINK = ["-shared", "-Wl,-z,defs", "-Wl,--no-as-needed,-ldl"]


def tensorrt_headers(root: str | None) -> Path:
    """The folder of NvInferRuntime.h. Raises BuildError."""
    if not root:
        raise BuildError(
            "TENSORRT_ROOT is not set. "
            "Run make plugin TENSORRT_ROOT=<folder with include/NvInferRuntime.h>."
        )
    folder = Path(root) / "include"
    if not (folder / "NvInferRuntime.h").is_file():
        raise BuildError(
            f"TENSORRT_ROOT={root} has no include/NvInferRuntime.h. "
            "Point it at TensorRT 10.14 or newer, or at a checkout of its public headers."
        )
    return folder


def cuda_headers() -> Path:
    """The folder of CUDA's headers: CUDA_HOME's, else those of PyPI packages, else those of nvcc.
    Raises BuildError."""
    folders = [Path(os.environ["CUDA_HOME"]) / "include"] if os.environ.get("CUDA_HOME") else []
    nvidia = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders += sorted(nvidia.glob("cu*/include"), reverse=True)
    if nvcc := shutil.which("nvcc"):
        folders.append(Path(nvcc).resolve().parents[1] / "include")
    folders.append(Path("/usr/local/cuda/include"))
    for folder in folders:
        # From CUDA 13 on, the last one is in a separate package.
        names = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
        if all((folder / name).is_file() for name in names):
            return folder
    raise BuildError(
        "CUDA's headers were not found. Set CUDA_HOME, or install them: "
        "pip install nvidia-cuda-runtime nvidia-cuda-crt."
    )


def make_images(out: Path) -> Images:
    """Compile the kernels for every architecture with NVRTC, into `out`. Raises BuildError."""
    return {
        (module, architecture): path
        for module, source in MODULES.items()
        for architecture, path in cubins.build(out, source=source, name=module).items()
    }


def build(root: str | None, out: Path, images: Images) -> Path:
    """Compile the plugin unless it exists; returns its path, `out`/liboutrider_tensorrt.so.

    root: the folder with TensorRT's include/. images: those of all MODULES. Raises BuildError.
    """
    return _compile_library(root, out, PLUGIN, SOURCES, images)


def can_build_engine(public: Path) -> bool:
    """Whether these headers can tell which caches an engine updates in place: 10.14's cannot."""
    return "getAliasedInputTensor" in (public / "NvInferRuntime.h").read_text()


def build_engine(root: str | None, out: Path) -> Path:
    """Compile the session's engine unless it exists: `out`/liboutrider_tensorrt_engine.so."""
    return _compile_library(root, out, ENGINE, ENGINE_SOURCES, {})


def _compile_library(root: str | None, out: Path, name: str, folder: Path, images: Images) -> Path:
    """Compile the sources in a folder, with a table of these images, into a library."""
    public, cuda = tensorrt_headers(root), cuda_headers()
    flags = [f"-isystem{public}", f"-isystem{cuda}", f"-I{folder}"]
    exports = [f"-Wl,--version-script={path}" for path in sorted(folder.glob("*.map"))]
    version = public / "NvInferVersion.h"
    if not version.is_file():
        raise BuildError(
            f"{public} has no NvInferVersion.h. Set TENSORRT_ROOT to a folder with all headers."
        )
    sources, input_files = sorted(folder.glob("*.cpp")), [version, *folder.iterdir(), *headers()]
    if images:
        table = out.resolve() / "images.cpp"
        write_atomically(table, _images_source(images).encode())
        sources, input_files = [*sources, table], [*input_files, table, *images.values()]
    jobs = [(str(source), flags) for source in sources]
    return link(
        out / f"{name}.so", build_cached(out, name, ".so", jobs, [*LINK, *exports], input_files)
    )


def _images_source(images: Images) -> str:
    """The C++ source of driver.h's IMAGES. The assembler includes the files."""
    data, rows = [], []
    for i, ((module, name), path) in enumerate(sorted(images.items())):
        kind, _, architecture = name.partition("_")
        ptx = kind == "compute"
        data.append(
            f'asm(".pushsection .rodata\\n.balign 16\\noutrider_image_{i}:\\n'
            f'.incbin \\"{path.resolve()}\\"\\n.byte 0\\n.popsection");\n'
            'extern "C" __attribute__((visibility("hidden"))) '
            f"const unsigned char outrider_image_{i}[];\n"
        )
        rows.append(
            f'    {{"{module}", {architecture}, {str(ptx).lower()}, outrider_image_{i}}},\n'
        )
    return (
        '#include "driver.h"\n\n'
        + "".join(data)
        + "\nnamespace outrider_tensorrt {\nconst Image IMAGES[] = {\n"
        + "".join(rows)
        + f"}};\nconst int IMAGE_COUNT = {len(rows)};\n}} // namespace outrider_tensorrt\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the TensorRT plugin and engine.")
    parser.add_argument("--tensorrt-root", default=os.environ.get("TENSORRT_ROOT"))
    parser.add_argument("--out", type=Path, default=PLUGINS_FOLDER.parent / "build" / "lib")
    arguments = parser.parse_args()
    return exit_status(lambda: _main(arguments.tensorrt_root, arguments.out))


def _main(root: str | None, out: Path) -> None:
    # Fail early: compiling the kernels takes minutes.
    headers_of = tensorrt_headers(root)
    cuda_headers()
    print(build(root, out, make_images(PLUGINS_FOLDER.parent / "build" / "cuda")))
    if can_build_engine(headers_of):
        print(build_engine(root, out))
    else:
        print(
            "note: without the session engine, which needs the headers of TensorRT 10.15 or newer",
            file=sys.stderr,
        )
    print("note: not linked with libnvinfer, none of whose symbols is used", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
