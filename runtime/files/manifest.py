"""The file contract between the rooms: what `export/`, `engines/` and `runtime/` hand each other.

`export/` writes a *graphs* folder (`pair.json` and the ONNX graphs), `engines/` turns it into a
*bundle* (`manifest.json` and the backend's engines), `runtime/` reads the bundle. All three use
the dataclasses of this module and nothing else of each other. docs/architecture.md has the layout.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import CommandParser, OutriderError, first_line, run_command
from .progress import note, size_text, stage
from .torch_files import (
    PROGRAM_FILE,
    TENSOR_ALIGNMENT,
    WEIGHTS_FILE,
    cpu_targets,
    place_tensors,
    read_program,
    read_tensors,
)

__all__ = [
    "MOST_GAMMA",
    "ONE_SLOT_FILE",
    "ORT_LEFT_OUT",
    "PROGRAM_FILE",
    "TENSOR_ALIGNMENT",
    "WEIGHTS_FILE",
    "CommandParser",
    "EngineFacts",
    "FileFacts",
    "Format",
    "GraphFacts",
    "Manifest",
    "OutriderError",
    "Pair",
    "Profile",
    "TokenizerFacts",
    "cpu_targets",
    "digest_json",
    "file_facts",
    "first_line",
    "link_file",
    "note",
    "place_tensors",
    "read_bundle",
    "read_json",
    "read_pair",
    "read_program",
    "read_tensors",
    "refuse_foreign",
    "run_command",
    "size_text",
    "stage",
    "verify_files",
    "write_folder",
    "write_json",
]  # fmt: skip

SCHEMA = 1
_KINDS = ("manifest", "pair", "graph")
MANIFEST_FILE, PAIR_FILE, PART_FILE = "manifest.json", "pair.json", "graph.json"
GRAPH_FILE = "graph.onnx"
ONE_SLOT_FILE = "one_slot.onnx"  # the same for one slot, in ONNX Runtime's own operators
PACKAGE_FILE = "engine.pt2"  # AOTInductor's
# Optimisers of ONNX Runtime that are left out. In float16 this one makes a node and does not say
# so; the next one asks for the node's operator, which nobody looked up, and the process dies.
ORT_LEFT_OUT = {"float16": ["MatmulTransposeFusion"]}
TOKENIZER_FILE, TEMPLATE_FILE = "tokenizer.json", "chat_template.jinja"
MOST_GAMMA = 64  # OUTRIDER_MAX_WIDTH of plugins/include/outrider.h
Dtype = Literal["float32", "float16", "bfloat16"]
Format = Literal["onnx", "torch"]  # of a graph: GRAPH_FILE or PROGRAM_FILE
T = TypeVar("T")


@dataclass(frozen=True)
class FileFacts:
    size: int
    sha256: str


@dataclass(frozen=True)
class GraphFacts:
    """One model's graph.

    key: content address of everything the graph was made from.
    vocab_size: the width of the logits, padding included.
    max_len: the longest sequence, in tokens, that the model was made for.
    key_shapes, value_shapes: per layer [kv_heads, head_dim] of a cache row.
    max_difference: largest absolute difference of the logits from the original model's; None
        where the graph could not be run (see `comparison`).
    tolerance: the bound that `max_difference` was held to.
    """

    key: str
    source: str
    architecture: str
    parameters: int
    dtype: Dtype
    vocab_size: int
    max_len: int
    capacity: int
    key_shapes: list[list[int]]
    value_shapes: list[list[int]]
    max_difference: float | None
    tolerance: float
    comparison: str
    versions: dict[str, str]
    files: dict[str, FileFacts]

    @property
    def format(self) -> Format:
        return "torch" if PROGRAM_FILE in self.files else "onnx"

    def cache_bytes(self, slots: int) -> int:
        rows = sum(heads * width for heads, width in (*self.key_shapes, *self.value_shapes))
        return slots * self.capacity * rows * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True)
class TokenizerFacts:
    """The target's tokenizer, carried along.

    vocab_size: largest id + 1. special_tokens: what chat templates name (bos_token, eos_token...).
    """

    key: str
    vocab_size: int
    eos_token_ids: list[int]
    special_tokens: dict[str, str]
    chat_template: bool
    files: dict[str, FileFacts]


@dataclass(frozen=True)
class Pair:
    """What `export/` hands to `engines/`.

    vocab_size: the common width; logits beyond it are padding with probability 0.
    max_len: longest prompt + output. max_gamma: most draft tokens a round.
    capacity: rows of a slot, at least max_len + max_gamma + 1: a verification never writes past it.
    lookup: what proposes where there is no draft model and a request does not say; None: nothing.
    """

    target: GraphFacts
    draft: GraphFacts | None
    tokenizer: TokenizerFacts
    vocab_size: int
    max_len: int
    max_gamma: int
    capacity: int
    lookup: Literal["ngram"] | None = None

    def models(self) -> Iterator[tuple[str, GraphFacts]]:
        """("target", facts), and ("draft", facts) where there is one."""
        yield "target", self.target
        if self.draft is not None:
            yield "draft", self.draft

    def logits_bytes(self, slots: int) -> int:
        """Of one round, in float32: the target's gamma + 1 rows and the draft's gamma."""
        draft = self.draft.vocab_size if self.draft else 0
        gamma = self.max_gamma if self.draft else 0
        return 4 * slots * ((gamma + 1) * self.target.vocab_size + gamma * draft)

    def carried_files(self, engines: dict[str, EngineFacts] | None) -> dict[str, FileFacts]:
        """What a bundle takes over from the graphs folder: not what its engines hold."""
        if not engines:
            return self.all_files()
        beside = {f"{role}/{engine.weights}" for role, engine in engines.items()}
        return {
            name: file
            for name, file in self.all_files().items()
            if name.startswith("tokenizer/") or name in beside
        }

    def all_files(self) -> dict[str, FileFacts]:
        """Every file of the pair, by its path from the folder that holds it."""
        parts = (("tokenizer", self.tokenizer), ("target", self.target), ("draft", self.draft))
        return {
            f"{part}/{name}": file
            for part, facts in parts
            if facts is not None
            for name, file in facts.files.items()
        }


@dataclass(frozen=True)
class Profile:
    """The shapes that a compiled engine takes: B, N and K as [smallest, expected, largest].

    S is the capacity. memory: bytes for activations; None where the builder did not say.
    """

    name: str
    slots: list[int]
    tokens: list[int]
    outputs: list[int]
    memory: int | None


@dataclass(frozen=True)
class EngineFacts:
    """One model compiled ahead of time.

    key: content address of everything the engine was made from. file: in the model's folder.
    targets: the GPU architectures that it runs on, such as sm89; of a CPU, what it must have.
    weights: the graph's file that holds them; None where they are in the engine. level: of
    optimisation, None for the builder's own.
    """

    key: str
    file: str
    targets: list[str]
    profiles: list[Profile]
    weights: str | None = None
    level: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A bundle: the pair, the backend it was built for, and every file with its hash.

    engines: by role; None where the backend runs the graphs, which the bundle then holds.
    """

    name: str
    backend: str
    versions: dict[str, str]
    slots: int
    pair: Pair
    files: dict[str, FileFacts]
    engines: dict[str, EngineFacts] | None = None

    def gpu_targets(self) -> list[str]:
        """The GPU architectures that the engines were compiled for, such as sm89."""
        engines = (self.engines or {}).values()
        targets = {target for engine in engines for target in engine.targets}
        return sorted((t for t in targets if t.startswith("sm")), key=lambda t: int(t[2:]))

    def _level(self) -> int | None:
        return next((engine.level for engine in (self.engines or {}).values()), None)

    def rebuild_command(self, out: Path, gpu: str | None = None) -> str:
        """What makes this bundle again, for the remedy of an error. gpu: one more, such as sm89."""
        pair = self.pair
        targets = {*self.gpu_targets(), *([gpu] if gpu else [])}
        # The others build for the GPU that is there.
        gpus = [t.removeprefix("sm") for t in targets if self.backend == "tensorrt_rtx"]
        variables = {
            "MODEL": f"<{pair.target.source}>",
            "DRAFT": f"<{pair.draft.source}>" if pair.draft else pair.lookup or "none",
            "BACKEND": self.backend,
            "DTYPE": pair.target.dtype,
            **({"SM": ",".join(sorted(gpus, key=int))} if gpus else {}),
            **({"OPT_LEVEL": level} if (level := self._level()) is not None else {}),
            "MAX_LEN": pair.max_len,
            "MAX_GAMMA": pair.max_gamma,
            "SLOTS": self.slots,
            "OUT": out,
        }
        return "make engines " + " ".join(f"{name}={value}" for name, value in variables.items())


def file_facts(path: Path) -> FileFacts:
    return FileFacts(path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON: the content address of a part."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: Path, kind: str, facts: Pair | GraphFacts | Manifest | TokenizerFacts) -> None:
    """Write one of the dataclasses, with its schema and a checksum over the whole."""
    content = dataclasses.asdict(facts)
    for field in dataclasses.fields(facts):
        if field.default is None and content[field.name] is None:
            del content[field.name]  # written only where there is something, as `_build` reads it
    body = {"kind": kind, "schema": SCHEMA, "facts": content}
    text = json.dumps({**body, "checksum": digest_json(body)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path, kind: str, cls: type[T], remedy: str) -> T:
    """Read what `write_json` wrote, refusing what is truncated, edited or of another schema."""

    def refuse(cause: str) -> OutriderError:
        return OutriderError("bundle", f"{path}: {cause}", remedy)

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(error.strerror or str(error)) from None
    except ValueError as error:
        raise refuse(f"not JSON, truncated or edited ({error})") from None
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise refuse(f"not a {kind} file of Outrider")
    if content.get("schema") != SCHEMA:
        raise refuse(f"schema {content.get('schema')}; this version reads schema {SCHEMA}")
    checksum = content.pop("checksum", None)
    if checksum != digest_json(content):
        raise refuse("the checksum does not match: the file was edited or damaged")
    try:
        facts = typing.cast(T, _build(cls, content["facts"], kind))
        _check_names(facts)
        return facts
    except (TypeError, ValueError, KeyError) as error:
        raise refuse(str(error)) from None


def _build(annotation: Any, value: Any, where: str) -> Any:
    """A value of the annotated type from JSON; TypeError names the field that does not fit."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _build(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise TypeError(f"{where} is {value!r}, not one of {', '.join(arguments)}")
        return value
    if origin is list and isinstance(value, list):
        return [_build(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: _build(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    dataclass_type = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
    if dataclass_type and isinstance(value, dict):
        fields = typing.get_type_hints(annotation)
        optional = {f.name for f in dataclasses.fields(annotation) if f.default is None}
        odd = sorted((fields.keys() ^ value.keys()) - (optional - value.keys()))
        if odd:
            raise TypeError(f"{where}: field {odd[0]} is missing or unknown")
        return annotation(**{k: _build(fields[k], v, f"{where}.{k}") for k, v in value.items()})
    if annotation is float and type(value) in (int, float):
        return float(value)
    if origin is None and type(value) is annotation:
        return value
    raise TypeError(f"{where} is {value!r}, not of type {annotation}")


def _check_names(facts: Any) -> None:
    """A file name may not lead out of its folder. Raises ValueError."""
    if isinstance(facts, Pair | Manifest):
        for part in vars(facts).values():
            _check_names(part)
    for name in getattr(facts, "files", ()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"the file name {name!r} leads out of the folder")


@contextmanager
def write_folder(folder: Path, marker: str) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the block ends well, and never half.

    marker: the file that tells ours apart; a folder with other contents is not replaced
    (OutriderError "disk").
    """
    folder = folder.resolve()  # through a symbolic link, not in its place
    refuse_foreign(folder, marker)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (
        folder.with_name(f".{folder.name}.{what}-{os.getpid()}") for what in ("partial", "replaced")
    )
    _recover(folder)
    try:
        partial.mkdir()
        yield partial
        if folder.exists():
            folder.rename(replaced)  # not removed before the new one is in its place
        partial.rename(folder)
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Clear up after processes that were killed while they wrote this folder."""
    for leftover in folder.parent.glob(f".{folder.name}.*-*"):
        what, _, process = leftover.name.removeprefix(f".{folder.name}.").partition("-")
        if what not in ("partial", "replaced") or not process.isdecimal() or _lives(int(process)):
            continue
        if what == "replaced" and not folder.exists():
            leftover.rename(folder)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# What our folders hold at the top; anything else in one is somebody's.
_OURS = {
    MANIFEST_FILE, PAIR_FILE, PART_FILE, GRAPH_FILE, ONE_SLOT_FILE, PROGRAM_FILE, WEIGHTS_FILE,
    "target", "draft", "tokenizer",
}  # fmt: skip


def refuse_foreign(folder: Path, marker: str) -> None:
    """Raises OutriderError "disk" where `write_folder` would have to replace what is not ours."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        ours = json.loads((folder / marker).read_text(encoding="utf-8"))["kind"] in _KINDS
    except (OSError, ValueError, TypeError, KeyError):
        ours = False
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in _OURS)
    if ours and not strangers:
        return
    why = f"it holds {strangers[0]}" if ours else f"it has no {marker} of ours"
    raise OutriderError(
        "disk",
        f"{folder} cannot be replaced: {why}",
        "Choose another OUT, or move it away yourself.",
    )


def link_file(source: Path, destination: Path) -> None:
    """The same file under a second name; a copy where the file system has no hard links."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        destination.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, destination)


def read_pair(folder: Path) -> Pair:
    remedy = "Export the checkpoints again: python -m export --help."
    return read_json(folder / PAIR_FILE, "pair", Pair, remedy)


_REBUILD = "Build it again: make engines MODEL=<target> DRAFT=<draft> OUT=<folder>."


def read_bundle(folder: Path, *, verify: bool = True) -> Manifest:
    """Read and validate a bundle's manifest and (unless verify=False) the hash of every file."""
    remedy = _REBUILD
    if not folder.is_dir():
        raise OutriderError("bundle", f"{folder} is not a folder", remedy)
    if not (folder / MANIFEST_FILE).is_file():
        what = "a Hugging Face checkpoint" if (folder / "config.json").is_file() else "no bundle"
        raise OutriderError("bundle", f"{folder} is {what}: it has no {MANIFEST_FILE}", remedy)
    manifest = read_json(folder / MANIFEST_FILE, "manifest", Manifest, remedy)
    pair = manifest.pair
    rows = pair.max_len + pair.max_gamma + 1
    fits = (
        pair.capacity == pair.target.capacity >= rows
        and pair.vocab_size <= pair.target.vocab_size
        and 1 <= pair.max_gamma <= MOST_GAMMA
    )
    expected = pair.carried_files(manifest.engines)
    for role, engine in (manifest.engines or {}).items():
        name = f"{role}/{engine.file}"
        expected[name] = manifest.files.get(name, FileFacts(-1, ""))
    if expected != manifest.files or not fits:
        cause = f"{folder / MANIFEST_FILE} contradicts itself: it was edited"
        raise OutriderError("bundle", cause, remedy)
    verify_files(folder, manifest.files, contents=verify, remedy=remedy)
    return manifest


def verify_part(folder: Path, manifest: Manifest, *, weights: bool) -> None:
    """The hashes of the files that hold numbers alone, or of all others. Whoever opens the former
    while they are damaged computes nonsense and runs none of it; an engine that holds its own
    weights is among the latter. Raises OutriderError "bundle"."""
    numbers = {f"{role}/{WEIGHTS_FILE}" for role, _ in manifest.pair.models()}
    files = {name: f for name, f in manifest.files.items() if (name in numbers) == weights}
    verify_files(folder, files, contents=True, remedy=_REBUILD)


def verify_files(folder: Path, files: dict[str, FileFacts], *, contents: bool, remedy: str) -> None:
    """Refuse missing, truncated and (with `contents`) edited files. Raises "bundle"."""
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            raise OutriderError("bundle", f"{path} is missing", remedy)
        size = path.stat().st_size
        if size != facts.size:
            cause = f"{path} has {size:,} bytes, not {facts.size:,}: truncated or replaced"
            raise OutriderError("bundle", cause, remedy)
        if contents and _sha256(path) != facts.sha256:
            raise OutriderError("bundle", f"{path} was edited or damaged: its hash differs", remedy)
