"""The engine classes of each backend: one line here, and a module for the CPU, a GPU or both.

The modules are imported when a bundle is opened, since hardly anyone has the libraries of all.
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
    """The engine classes, as module.Class of this package: host for the CPU, device for a GPU; ""
    if there is none."""

    host: str = ""
    device: str = ""


BACKENDS = {
    "onnxruntime": Backend("onnxruntime.OrtEngine", "onnxruntime.OrtCudaEngine"),
    "aotinductor": Backend("aotinductor.AotiEngine", "aotinductor.AotiCudaEngine"),
    "tensorrt_rtx": Backend(device="tensorrt.TensorRtRtxEngine"),
    "tensorrt": Backend(device="tensorrt.TensorRtEngine"),
}


def host_engine(backend: str) -> type[HostEngine[Any]]:
    """The engine class for the CPU. Raises OutriderError "backend" if the backend has none."""
    found = BACKENDS.get(backend, Backend()).host
    return cast("type[HostEngine[Any]]", _load(backend, found, "the CPU", "onnxruntime"))


def device_engine(backend: str) -> type[DeviceEngine]:
    """The engine class for a GPU. Raises OutriderError "backend" if the backend has none."""
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
