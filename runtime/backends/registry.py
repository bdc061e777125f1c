"""The engine classes of each backend: one line here, and a module for the CPU, a GPU or both.

The modules are imported when a bundle is opened, since hardly anyone has the libraries of all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ..files.errors import OutriderError

if TYPE_CHECKING:
    from .device import DeviceEngine
    from .host import HostEngine


# As module.Class of this package: the class for the CPU and the one for a GPU; "" for none.
BACKENDS = {
    "onnxruntime": ("onnxruntime.OrtEngine", "onnxruntime.OrtCudaEngine"),
    "aotinductor": ("aotinductor.AotiEngine", "aotinductor.AotiCudaEngine"),
    "tensorrt_rtx": ("", "tensorrt.TensorRtRtxEngine"),
    "tensorrt": ("", "tensorrt.TensorRtEngine"),
}


def host_engine(backend: str) -> type[HostEngine[Any]]:
    """The engine class for the CPU. Raises OutriderError "backend" if the backend has none."""
    return cast("type[HostEngine[Any]]", _load(backend, 0, "the CPU", "onnxruntime"))


def device_engine(backend: str) -> type[DeviceEngine]:
    """The engine class for a GPU. Raises OutriderError "backend" if the backend has none."""
    return cast("type[DeviceEngine]", _load(backend, 1, "a GPU", "tensorrt_rtx"))


def _load(backend: str, index: int, where: str, other: str) -> object:
    module, _, engine = BACKENDS.get(backend, ("", ""))[index].partition(".")
    if not module:
        cause = f"this version cannot run bundles of the backend {backend} on {where}"
        raise OutriderError("backend", cause, f"Build the bundle with BACKEND={other}.")
    return getattr(import_module(f".{module}", __package__), engine)
