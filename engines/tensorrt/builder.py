"""From a portable graph to a TensorRT engine: one code over `tensorrt` and `tensorrt_rtx`.

The library works in a process of its own (`python -m engines.tensorrt.builder`): some graphs make
it abort, some failures it prints past its logger, and Ctrl-C should not wait for its next step. The
process reads one JSON request and answers in JSON lines: phases, then a result or an error.
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
from runtime.files.manifest import CHUNK, GRAPH_FILE, EngineFacts, GraphFacts, Profile
from runtime.files.progress import Stage, stage

from ..keys import engine_key

TIMINGS = Path(__file__).parents[2] / "build" / ".cache" / "tensorrt"


def profiles(role: str, facts: GraphFacts, slots: int, max_gamma: int) -> list[Profile]:
    """The shapes that an engine is made for: steps and verifications, and prompts."""
    width, chunk = max_gamma + 1, min(CHUNK, facts.capacity)
    usual = width if role == "target" else 1
    return [
        Profile("decode", [1, slots, slots], [1, usual, width], [1, usual, width], None),
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
    """What is to be compiled, with keys; the builder's own figures are still missing. level: of
    optimisation, None for the library's own."""
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
    """Compile the graph in folder `graph` into `out / to.file`; `to` with the builder's figures.

    module: the library's name in Python; product: its name for people. timings: a file of kernel
    times that were measured before, to be used and added to. Prints a line on stderr.
    Raises OutriderError "backend" or "memory", and OSError where the file cannot be written.
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
        memory = _ask(request, progress)
        if len(memory) != len(to.profiles):
            memory = [None] * len(to.profiles)  # the log of this version reads otherwise
        made = dataclasses.replace(
            to,
            profiles=[
                dataclasses.replace(profile, memory=size)
                for profile, size in zip(to.profiles, memory, strict=True)
            ],
        )
        figures = [f"{(out / to.file).stat().st_size / 2**20:,.1f} MiB"] + [
            f"{profile.name} {profile.memory / 2**20:,.1f} MiB"
            for profile in made.profiles
            if profile.memory is not None
        ]
        progress.note = ", ".join(figures)
    return made


def _ask(request: dict[str, Any], progress: Stage) -> list[int | None]:
    """Have the process compile; the bytes that each profile's activations take."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "engines.tensorrt.builder"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        assert process.stdin is not None and process.stdout is not None
        result: dict[str, Any] = {}
        try:
            with suppress(BrokenPipeError):  # it died at once: `_ended` will tell
                process.stdin.write(json.dumps(request).encode())
            with suppress(BrokenPipeError):
                process.stdin.close()
            for line in process.stdout:
                if not line.endswith(b"\n"):  # it died in the middle of it
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
            said.seek(0)
            text = said.read().decode("utf-8", "replace")
            raise _ended(request["product"], request["source"], process.returncode, text)
    memory: list[int | None] = result["memory"]
    return memory


def _ended(product: str, source: str, status: int, said: str) -> OutriderError:
    """A process that died without a word of its own."""
    if status == -signal.SIGKILL:
        return OutriderError(
            "memory",
            f"{product} was killed while it compiled {source}: probably not enough memory",
            "Use a smaller checkpoint, or a machine with more memory.",
        )
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = ([line for line in said.splitlines() if line.strip()] or ["no message"])[-1].strip()
    return OutriderError(
        "backend", f"{product} ended with {how} while it compiled {source}: {last[:200]}", REMEDY
    )


REMEDY = "Build with BACKEND=onnxruntime DTYPE=float32, and report the architecture."


# In the process


def _serve() -> None:
    """Read a request from stdin, compile, answer on what was stdout."""
    request = json.load(sys.stdin)
    # The library may print on either; neither may get into the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        answer(memory=_compile(importlib.import_module(request["module"]), request, answer))
    except OutriderError as error:
        answer(cause=error.cause, remedy=error.remedy)
    except OSError as error:
        if error.errno is None:
            raise
        answer(errno=error.errno, file=str(error.filename or request["out"]))


def _compile(trt: Any, request: dict[str, Any], answer: Callable[..., None]) -> list[int]:
    """Write the engine; the bytes of device memory that each profile's activations take.

    trt: the `tensorrt` or `tensorrt_rtx` module. Raises OutriderError "backend", OSError.
    """
    what = f"{request['product']} {trt.__version__} refuses the graph of {request['source']}"
    errors: list[str] = []
    memory: list[int] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                errors.append(message)
            # What an engine tells when it is loaded, which takes a GPU; one line for each profile.
            if found := re.match(r"Total Activation Memory: (\d+) bytes", message):
                memory.append(int(found[1]))

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            answer(phase=name)  # hundreds

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
        raise _refused(what, parser.get_error(0) if parser.num_errors else None, errors)
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    if hasattr(config, "num_compute_capabilities"):  # TensorRT proper builds for the GPU it sees
        config.num_compute_capabilities = len(request["targets"])
        for i, target in enumerate(request["targets"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), i)
    # TensorRT-RTX may allocate while it runs, which no graph can hold, unless it must ask us.
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
        raise OutriderError("backend", f"{what}: {_reason(errors)}", REMEDY)
    if timings:
        keep_timings(config, timings)
    with open(request["out"], "wb") as file:
        file.write(engine)
    return memory


def use_timings(config: Any, file: Path) -> None:
    """Let the builder look kernel times up before it measures them."""
    try:
        known = file.read_bytes()
    except OSError:
        known = b""
    cache = config.create_timing_cache(known) or config.create_timing_cache(b"")  # damaged
    config.set_timing_cache(cache, False)


def keep_timings(config: Any, file: Path) -> None:
    """What was measured, for the next build; a disk that takes no cache fails no build."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            new.write_bytes(config.get_timing_cache().serialize())


def with_fixed_rows(path: str, capacity: int, what: str) -> bytes:
    """The graph with S fixed, without its weights: the parser refuses a cache whose S is open."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # noqa: BLE001 - protobuf's own class, which is nobody's dependency
        raise OutriderError(
            "backend", f"{what}: it is no ONNX file ({first_line(error)})", "Export it again."
        ) from None
    for value in (*model.graph.input, *model.graph.output):
        shape = value.type.tensor_type.shape
        if value.name.startswith(("key_", "value_")):
            shape.dim[2].dim_value = capacity  # in place of the name that it had
    serialized: bytes = model.SerializeToString()
    return serialized


def make_profile(builder: Any, network: Any, shapes: dict[str, Any]) -> Any:
    """`shapes` (a Profile) for every input of the network."""
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


def _refused(what: str, error: Any, errors: list[str]) -> OutriderError:
    """error: the parser's first, if it has one."""
    if error is None:
        return OutriderError("backend", f"{what}: {_reason(errors)}", REMEDY)
    node = f"{error.node_name()} ({error.node_operator()})"
    reason = _reason([line for line in error.desc().splitlines() if "Invalid Node" not in line])
    return OutriderError("backend", f"{what} at node {node}: {reason}", REMEDY)


def _reason(messages: list[str]) -> str:
    """The first message that says something about the graph, without the library's own places."""
    for message in messages:
        if "cudaError" in message or not message.strip():
            continue  # there is no driver, which is no failure here
        line = " ".join(message.split())
        line = re.sub(r"^.*?Error Code \d+: [^(]*\((.*)\)?$", r"\1", line)
        line = re.sub(
            r"\[[^\]]*\] |\w*Exception: |[\w.]+\.(?:cpp|h):\d+: |CHECK\(.*?\) failed\. ", "", line
        )
        line = re.split(r"\.? +(?:In \w+ at /|\(See )", line)[0]
        return line.rstrip(" .)")[:200]
    return "it gives no reason"


if __name__ == "__main__":
    _serve()
