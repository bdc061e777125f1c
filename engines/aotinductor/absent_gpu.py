"""Compile for a GPU that this machine need not have.

torch compiles for the GPU that it runs on: it moves the weights there, asks the driver for its
properties, and runs kernels to choose between configurations. Here weights are fake tensors, which
have a shape, a type and a device but no memory; questions are answered from a table; and each
kernel gets the first configuration that Inductor proposes, of at most two in these programs. So a
package does not depend on the GPU of the machine that builds it, which needs neither a GPU nor a
driver nor PyTorch for CUDA. It does depend on that machine's architecture and C library.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from runtime.files.torch_files import place_tensors

from .cpp_compiler import find_cpp_compiler

if TYPE_CHECKING:
    import torch

DEVICE = "cuda:0"


class Gpu(NamedTuple):
    """What Inductor and Triton read of a GPU, from NVIDIA's tables of compute capabilities and, for
    the number of multiprocessors, of one card: it only guides how sums are split."""

    multiprocessors: int
    threads: int  # resident on one multiprocessor
    shared_memory: int  # of one block, in KiB


GPUS = {  # by compute capability
    75: Gpu(40, 1024, 64),
    80: Gpu(108, 2048, 163),
    86: Gpu(84, 1536, 99),
    87: Gpu(16, 1536, 163),
    89: Gpu(142, 1536, 99),
    90: Gpu(132, 2048, 227),
    100: Gpu(148, 2048, 227),
    103: Gpu(148, 2048, 227),
    110: Gpu(20, 1536, 227),
    120: Gpu(188, 1536, 99),
    121: Gpu(48, 1536, 99),
}
REGISTERS = 65536  # of a multiprocessor
# Libraries that the linker looks for, the names they are loaded by, and a function of each that
# every package calls: the linker drops libraries that it finds unused.
LIBRARIES = (
    ("cuda", "libcuda.so.1", "cuLaunchKernel"),
    ("torch_cuda", "libtorch_cuda.so", "aoti_torch_create_cuda_stream_guard"),
)
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
"""


def hollow(program: torch.export.ExportedProgram) -> None:
    """Replace the tensors of a program by fake ones on `DEVICE`."""
    import torch
    from torch._guards import detect_fake_mode

    computed = [node.meta.get("val") for node in program.graph.nodes]
    mode = detect_fake_mode(computed)
    assert mode is not None

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE
            )

    tensors = {**program.state_dict, **program.constants}
    place_tensors(program, {n: fake(t) for n, t in tensors.items() if isinstance(t, torch.Tensor)})
    program.example_inputs = torch.utils._pytree.tree_map_only(
        torch.Tensor, fake, program.example_inputs
    )


def link_stubs(folder: Path) -> None:
    """Write stubs of `LIBRARIES` to link with. Raises RuntimeError."""
    for name, loaded_as, function in LIBRARIES:
        code = f'extern "C" void {function}() {{}}\n'
        _make_library(folder / f"lib{name}.so", code, f"-Wl,-soname,{loaded_as}")


@lru_cache
def _register_guard() -> None:
    """Register a guard that changes no device, for what torch's C++ code enters before it works on
    a fake tensor. If torch is for CUDA, it replaces the one that needs a driver."""
    import torch

    installed = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "guard.so")
        _make_library(
            path, GUARD, "-std=c++20", f"-I{installed}/include", f"-L{installed}/lib", "-lc10"
        )
        ctypes.CDLL(str(path))


def _make_library(path: Path, code: str, *options: str) -> None:
    done = subprocess.run(
        [find_cpp_compiler(), "-shared", "-fPIC", "-x", "c++", "-", *options, "-o", path],
        input=code, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)


@contextmanager
def pretend(capability: int) -> Iterator[None]:
    """Let torch and Triton compile for a GPU of this capability, a key of `GPUS`, in this process.
    Nothing that needs a GPU may run meanwhile. Raises RuntimeError."""
    import torch
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import graph
    from torch._inductor.codecache import CacheBase
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor
    from torch.utils._triton import _device_supports_tma, has_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import max_shared_mem

    if not torch.cuda.is_available():
        _register_guard()
    gpu = GPUS[capability]
    properties = SimpleNamespace(
        name=f"sm{capability}",  # for torch's error messages
        major=capability // 10, minor=capability % 10, warp_size=32, max_threads_per_block=1024,
        multi_processor_count=gpu.multiprocessors, regs_per_multiprocessor=REGISTERS,
        max_threads_per_multi_processor=gpu.threads,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    own = {name.lstrip("_"): staticmethod(answer) for name, answer in answers.items()}
    own["get_raw_stream"] = staticmethod(_no_stream)
    interface = type("Interface", (device_interface.CudaInterface,), own)

    class Driver:
        """Triton's."""

        launcher_cls = staticmethod(lambda source, metadata: None)
        utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": gpu.shared_memory * 1024},
            # Module, function, registers, spills, most threads in a block. With the registers,
            # Inductor would propose further configurations, to be timed.
            load_binary=lambda *binary: (0, 0, None, 0, 1024),
        )
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: 0)

    def choose_first(self: Any, *_: object, **__: object) -> None:
        self.precompile()
        self.save_gpu_kernel(0, self.launchers[0])

    def run_on_fakes(
        self: Any, run: Any = PythonWrapperCodegen.generate_and_run_autotune_block
    ) -> None:
        with fake_tensor.FakeTensorMode():
            run(self)

    init_patterns = joint_graph.lazy_init  # computes on the device
    driver = triton.runtime.driver
    previous = driver._active
    device_interface.init_device_reg()
    caches = (
        has_triton, _device_supports_tma, DeviceProperties.create, max_shared_mem,
        torch._inductor.utils.get_gpu_type, torch._inductor.utils.is_big_gpu,
        CacheBase.get_system,
    )  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for where, name, new in (
            (torch.version, "cuda", torch.version.cuda or "13.0"),
            (torch._C, "_cuda_getCurrentRawStream", _no_stream),
            (joint_graph, "lazy_init", lambda device: init_patterns(torch.device("cpu"))),
            (fake_tensor, "init_gpu_context", lambda device: None),
            (graph, "is_same_tensor", lambda a, b: a is b),  # asks for addresses
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (PythonWrapperCodegen, "generate_and_run_autotune_block", run_on_fakes),
            (CachingAutotuner, "run", choose_first),
        ):
            absent = where is torch._C  # in PyTorch for the CPU
            stack.enter_context(patch.object(where, name, new, create=absent))
        interfaces = {"cuda": interface, DEVICE: interface}
        stack.enter_context(patch.dict(device_interface.device_interfaces, interfaces))
        properties_seen = device_interface.caching_worker_device_properties
        stack.enter_context(patch.dict(properties_seen, clear=True))
        driver.set_active(Driver())
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        try:
            yield
        finally:
            driver._active = previous


def _no_stream(device: object) -> int:
    return 0
