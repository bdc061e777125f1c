"""Compile a portable graph to a TensorRT engine: the same code for `tensorrt` and `tensorrt_rtx`.

The library runs in a separate process (`python -m engines.tensorrt.builder`): it aborts on some
graphs, prints some failures without using its logger, and would make Ctrl-C wait for its next step.
The process reads one JSON request and answers in JSON lines: phases, then a result or an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError, first_line
from runtime.files.folders import replacing
from runtime.files.graphs import GRAPH_FILE, GraphFacts
from runtime.files.manifest import CHUNK, EngineFacts, Profile
from runtime.files.progress import Stage, stage

from ..keys import engine_key

TIMINGS = Path(__file__).parents[2] / "build" / ".cache" / "tensorrt"


def profiles(role: str, facts: GraphFacts, slots: int, max_gamma: int) -> list[Profile]:
    """The shapes that an engine is optimised for: steps and verifications, and prompts."""
    width, chunk = max_gamma + 1, min(CHUNK, facts.capacity)
    typical = width if role == "target" else 1
    return [
        Profile("decode", [1, slots, slots], [1, typical, width], [1, typical, width], None),
        Profile("prefill", [1, 1, slots], [1, chunk, chunk], [1, 1, 1], None),
    ]


def plan(
    name: str,  # of the engine's file
    models: dict[str, GraphFacts],
    slots: int,
    max_gamma: int,
    targets: list[str],
    versions: dict[str, str],
    level: int | None,
) -> dict[str, EngineFacts]:
    """The engines to compile, by role, with their keys but without the builder's figures. level:
    optimisation level, None for the library's default."""
    planned = {}
    for role, facts in models.items():
        shapes = profiles(role, facts, slots, max_gamma)
        key = engine_key(
            graph=dataclasses.asdict(facts),
            profiles=[dataclasses.asdict(profile) for profile in shapes],
            targets=targets,
            versions=versions,
            level=level,
        )
        planned[role] = EngineFacts(key, name, targets, shapes, level=level)
    return planned


def compile(
    module: str,
    product: str,
    role: str,
    graph: Path,
    out: Path,
    facts: GraphFacts,
    to: EngineFacts,
    *,
    timings: Path | None = None,
) -> EngineFacts:
    """Compile the graph in folder `graph` into `out / to.file`. Returns `to`, completed with the
    builder's figures.

    module: the library's module name; product: its display name. timings: a file of kernel times
    measured by earlier builds, to be used and added to. Prints a line to stderr.
    Raises OutriderError "backend" or "memory", and OSError if the file cannot be written.
    """
    request = {
        "module": module,
        "product": product,
        "graph": str((graph / GRAPH_FILE).resolve()),
        "out": str((out / to.file).resolve()),
        "source": facts.source,
        "capacity": facts.capacity,
        "targets": to.targets,
        "profiles": [dataclasses.asdict(profile) for profile in to.profiles],
        "level": to.level,
        "timings": str(timings) if timings else None,
    }
    out.mkdir(exist_ok=True)
    with stage(role, f"compile for {' '.join(to.targets)}") as progress:
        memory = _compile_in_process(request, progress)
        if len(memory) != len(to.profiles):
            memory = [None] * len(to.profiles)  # this version's log has another format
        completed = dataclasses.replace(
            to,
            profiles=[
                dataclasses.replace(profile, memory=size)
                for profile, size in zip(to.profiles, memory, strict=True)
            ],
        )
        figures = [f"{(out / to.file).stat().st_size / 2**20:,.1f} MiB"] + [
            f"{profile.name} {profile.memory / 2**20:,.1f} MiB"
            for profile in completed.profiles
            if profile.memory is not None
        ]
        progress.note = ", ".join(figures)
    return completed


def _compile_in_process(request: dict[str, Any], progress: Stage) -> list[int | None]:
    """Compile in a separate process. Returns the bytes of each profile's activations."""
    with tempfile.TemporaryFile() as stderr_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "engines.tensorrt.builder"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            start_new_session=True,  # only this process handles Ctrl-C
        )
        assert process.stdin is not None and process.stdout is not None
        result: dict[str, Any] = {}
        try:
            with suppress(BrokenPipeError):  # it died at once: `_crash_error` reports that
                process.stdin.write(json.dumps(request).encode())
            with suppress(BrokenPipeError):
                process.stdin.close()
            for line in process.stdout:
                if not line.endswith(b"\n"):  # it died in the middle of a line
                    break
                message = json.loads(line)
                result.update(message)
                progress.phase = message.get("phase", progress.phase)
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if "errno" in result:
            raise OSError(result["errno"], os.strerror(result["errno"]), result["file"])
        if "cause" in result:
            raise OutriderError("backend", result["cause"], result["remedy"])
        if "memory" not in result:
            stderr_file.seek(0)
            stderr = stderr_file.read().decode("utf-8", "replace")
            raise _crash_error(request["product"], request["source"], process.returncode, stderr)
    memory: list[int | None] = result["memory"]
    return memory


def _crash_error(product: str, source: str, status: int, stderr: str) -> OutriderError:
    """The error for a process that died without reporting one."""
    if status == -signal.SIGKILL:
        return OutriderError(
            "memory",
            f"{product} was killed while compiling {source}, probably for lack of memory",
            "Use a smaller checkpoint, or a machine with more memory.",
        )
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    last = ([line for line in stderr.splitlines() if line.strip()] or ["no message"])[-1].strip()
    return OutriderError(
        "backend", f"{product} ended with {ending} while compiling {source}: {last[:200]}", _REMEDY
    )


_REMEDY = "Build with BACKEND=onnxruntime DTYPE=float32, and report the architecture."


# In the separate process


def _answer_request() -> None:
    """Read a request from stdin, compile, and answer on the original stdout."""
    request = json.load(sys.stdin)
    # The library may print to stdout or stderr; neither may mix with the answers.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**message: Any) -> None:
        print(json.dumps(message), file=output, flush=True)

    try:
        send(memory=_compile(importlib.import_module(request["module"]), request, send))
    except OutriderError as error:
        send(cause=error.cause, remedy=error.remedy)
    except OSError as error:
        if error.errno is None:
            raise
        send(errno=error.errno, file=str(error.filename or request["out"]))


def _compile(trt: Any, request: dict[str, Any], send: Callable[..., None]) -> list[int]:
    """Write the engine. Returns the bytes of device memory of each profile's activations.

    trt: the `tensorrt` or `tensorrt_rtx` module. Raises OutriderError "backend", OSError.
    """
    what = f"{request['product']} {trt.__version__} rejects the graph of {request['source']}"
    errors: list[str] = []
    memory: list[int] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                errors.append(message)
            # Only a loaded engine reports this otherwise, which takes a GPU. One line per profile.
            if found := re.match(r"Total Activation Memory: (\d+) bytes", message):
                memory.append(int(found[1]))

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            send(phase=name)  # hundreds of them

        def step_complete(self, name: str, step: int) -> bool:
            return True

        def phase_finish(self, name: str) -> None:
            pass

    logger, monitor = Logger(), Monitor()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    graph = with_fixed_rows(request["graph"], request["capacity"], what)
    if not parser.parse(graph, request["graph"]):
        raise _parser_error(what, parser.get_error(0) if parser.num_errors else None, errors)
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    if hasattr(config, "num_compute_capabilities"):  # only RTX; TensorRT uses the present GPU
        config.num_compute_capabilities = len(request["targets"])
        for i, target in enumerate(request["targets"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), i)
    # Without this flag TensorRT-RTX may allocate memory at run time, which no CUDA graph allows.
    if (flag := getattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)) is not None:
        config.set_flag(flag)
    for shapes in request["profiles"]:
        config.add_optimization_profile(make_profile(builder, network, shapes))
    if request["level"] is not None:
        config.builder_optimization_level = request["level"]
    timings = Path(request["timings"]) if request["timings"] else None
    if timings:
        use_timings(config, timings)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise OutriderError("backend", f"{what}: {_reason(errors)}", _REMEDY)
    if timings:
        keep_timings(config, timings)
    with open(request["out"], "wb") as file:
        file.write(engine)
    return memory


def use_timings(config: Any, file: Path) -> None:
    """Let the builder reuse the kernel times of earlier builds."""
    try:
        known = file.read_bytes()
    except OSError:
        known = b""
    cache = config.create_timing_cache(known) or config.create_timing_cache(b"")  # if damaged
    config.set_timing_cache(cache, False)


def keep_timings(config: Any, file: Path) -> None:
    """Save the kernel times for later builds. A write error does not fail the build."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            new.write_bytes(config.get_timing_cache().serialize())


def with_fixed_rows(path: str, capacity: int, what: str) -> bytes:
    """The graph with S fixed and without its weights: the parser rejects a cache of dynamic S."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # noqa: BLE001 - a class of protobuf, which we do not depend on
        raise OutriderError(
            "backend", f"{what}: it is not an ONNX file ({first_line(error)})", "Export it again."
        ) from None
    for value in (*model.graph.input, *model.graph.output):
        shape = value.type.tensor_type.shape
        if value.name.startswith(("key_", "value_")):
            shape.dim[2].dim_value = capacity  # replaces the symbolic name
    serialized: bytes = model.SerializeToString()
    return serialized


def make_profile(builder: Any, network: Any, shapes: dict[str, Any]) -> Any:
    """The optimisation profile with `shapes` (a Profile) for every input of the network."""
    profile = builder.create_optimization_profile()
    slots, tokens, outputs = shapes["slots"], shapes["tokens"], shapes["outputs"]
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        rows = tuple(tensor.shape)[1:]
        each = {
            "input_ids": zip(slots, tokens, strict=True),
            "position": zip(slots, strict=True),
            "logits_index": zip(outputs, strict=True),
        }.get(tensor.name) or ((size, *rows) for size in slots)
        profile.set_shape(tensor.name, *map(tuple, each))
    return profile


def _parser_error(what: str, error: Any, errors: list[str]) -> OutriderError:
    """The error for a graph that the parser rejects. error: the parser's first one, if any."""
    if error is None:
        return OutriderError("backend", f"{what}: {_reason(errors)}", _REMEDY)
    node = f"{error.node_name()} ({error.node_operator()})"
    reason = _reason([line for line in error.desc().splitlines() if "Invalid Node" not in line])
    return OutriderError("backend", f"{what} at node {node}: {reason}", _REMEDY)


def _reason(messages: list[str]) -> str:
    """The first message about the graph, without the library's source locations."""
    for message in messages:
        if "cudaError" in message or not message.strip():
            continue  # building without a driver is not an error
        line = " ".join(message.split())
        line = re.sub(r"^.*?Error Code \d+: [^(]*\((.*)\)?$", r"\1", line)
        line = re.sub(
            r"\[[^\]]*\] |\w*Exception: |[\w.]+\.(?:cpp|h):\d+: |CHECK\(.*?\) failed\. ", "", line
        )
        line = re.split(r"\.? +(?:In \w+ at /|\(See )", line)[0]
        return line.rstrip(" .)")[:200]
    return "no reason was given"


if __name__ == "__main__":
    _answer_request()
