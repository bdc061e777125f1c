"""What runs the bundles of each backend: one line here, and a module for the CPU, a GPU or both.

The modules are imported when a bundle is opened: nobody has the libraries of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ..files.errors import OutriderError

if TYPE_CHECKING:
    from .device import DeviceEngine
    from .host import HostEngine


@dataclass(frozen=True)
class Backend:
    """module.Class of this package: host for the CPU, device for a GPU; "" where there is none."""

    host: str = ""
    device: str = ""


BACKENDS = {
    "onnxruntime": Backend("onnxruntime.OrtEngine", "onnxruntime.OrtCudaEngine"),
    "aotinductor": Backend("aotinductor.AotiEngine", "aotinductor.AotiCudaEngine"),
    "tensorrt_rtx": Backend(device="tensorrt.TensorRtRtxEngine"),
    "tensorrt": Backend(device="tensorrt.TensorRtEngine"),
}


def host_engine(backend: str) -> type[HostEngine[Any]]:
    """Raises OutriderError "backend" where it does not run on the CPU."""
    found = BACKENDS.get(backend, Backend()).host
    return cast("type[HostEngine[Any]]", _load(backend, found, "the CPU", "onnxruntime"))


def device_engine(backend: str) -> type[DeviceEngine]:
    """Raises OutriderError "backend" where it does not run on a GPU."""
    found = BACKENDS.get(backend, Backend()).device
    return cast("type[DeviceEngine]", _load(backend, found, "a GPU", "tensorrt_rtx"))


def _load(backend: str, name: str, where: str, other: str) -> object:
    if not name:
        raise OutriderError(
            "backend",
            f"this version cannot run bundles of the backend {backend} on {where}",
            f"Build the bundle with BACKEND={other}.",
        )
    module, _, engine = name.partition(".")
    return getattr(import_module(f".{module}", __package__), engine)
