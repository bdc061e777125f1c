"""The wheel's native part: liboutrider and its headers, compiled where there is a C++ compiler, and
the machine code for GPUs that `make wheel` has made.

Without a compiler the wheel is pure Python, and the runtime samples in NumPy. Everything else is in
pyproject.toml.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # a build backend does not put it there

from plugins.tools.build import NAME, BuildError, build  # noqa: E402

LIBRARY: Path | None = None
try:
    LIBRARY = build(HERE / "build" / "lib")
except BuildError as error:
    print(f"warning: a wheel without the sampling kernel: {error}", file=sys.stderr)


class BuildWithKernel(build_py):
    def run(self) -> None:
        super().run()
        if LIBRARY is not None and not self.editable_mode:  # a checkout has its own: make plugins
            package = Path(self.build_lib, "outrider")
            shutil.copyfile(LIBRARY, package / NAME)
            for folder in ("include", "cmake"):  # for C++: python -m outrider.cmake
                shutil.copytree(HERE / "plugins" / folder, package / folder, dirs_exist_ok=True)
            images = HERE / "build" / "cuda"
            for image in (
                *images.glob("outrider_sm_*.cubin"),
                *images.glob("outrider_compute_*.ptx"),
            ):
                shutil.copyfile(image, package / image.name)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The library is called through ctypes: any Python, no ABI, but this platform.
        return ("py3", "none", super().get_tag()[2]) if LIBRARY else super().get_tag()


class MaybeNative(Distribution):
    def has_ext_modules(self) -> bool:
        return LIBRARY is not None


setup(
    packages=["outrider", *(f"outrider.{room}" for room in find_packages("runtime"))],
    distclass=MaybeNative,
    cmdclass={"build_py": BuildWithKernel, "bdist_wheel": PlatformWheel},
    options={"build": {"build_base": "build/wheel"}},  # build/lib is the checkout's own
)
