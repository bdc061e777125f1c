"""The bundle: what `engines/` makes of a graphs folder (`graphs`), and what `runtime/` reads.

`export/`, `engines/` and `runtime/` use the dataclasses of these two modules and nothing else of
each other. docs/architecture.md has the layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from .errors import OutriderError
from .graphs import (
    ENCODER_FILE,
    GRAPH_FILE,
    HOST_FILE,
    HOST_WEIGHTS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Bytes,
    FileFacts,
    FileName,
    Pair,
    verify_files,
)
from .records import Count, Rule, SmallCount, between, convert_read_errors, read_json
from .torch_files import ENCODER_WEIGHTS_FILE, WEIGHTS_FILE

MANIFEST_FILE = "manifest.json"
PACKAGE_FILE, ENCODER_PACKAGE_FILE = "engine.pt2", "encoder_engine.pt2"  # AOTInductor's
ENCODER_DECODERS = "encoder-decoders"  # printed by `engines --supports` if a backend runs them
RECURRENT_STATES = "recurrent-states"  # the same for recurrent layers
# Optimisers of ONNX Runtime that are disabled. In float16, this one creates a node without
# reporting it; the next optimiser then reads the node's unresolved operator, and the process dies.
ORT_LEFT_OUT = {"float16": ["MatmulTransposeFusion"]}
MAX_SLOTS = 1 << 16
FIRST_ROWS = 256  # initial rows of a slot on the CPU; doubled as texts grow
CHUNK = 256  # most tokens of a prompt in one call; bounds the activations

Sizes = Annotated[
    list[Count],
    Rule("three ascending sizes", lambda sizes: len(sizes) == 3 and sizes == sorted(sizes)),
]
Target = Annotated[
    str,
    Rule("a GPU such as sm89", lambda text: re.fullmatch(r"sm\d{2,4}|(?!sm).+", text) is not None),
]
PlainName = Annotated[FileName, Rule("a file name without folders", lambda name: "/" not in name)]


@dataclass(frozen=True)
class Profile:
    """The shapes that a compiled engine accepts: B, N and K as [smallest, expected, largest].

    S is the capacity. memory: bytes for activations; None if the builder did not report it.
    """

    name: str
    slots: Sizes
    tokens: Sizes
    outputs: Sizes
    memory: Bytes | None


@dataclass(frozen=True)
class EngineFacts:
    """One model compiled ahead of time.

    key: content address of everything the engine was made from. file: in the model's folder.
    targets: the GPU architectures that it runs on, such as sm89; for a CPU, what it must support.
    weights: the graph's file that contains them; None if they are in the engine. level: of
    optimisation, None for the builder's default. encoder: the file of an encoder-decoder's encoder,
    whose weights are also the graph's.
    """

    key: str
    file: PlainName
    targets: list[Target]
    profiles: list[Profile]
    weights: PlainName | None = None
    level: int | None = None
    encoder: PlainName | None = None

    @property
    def activation_bytes(self) -> int | None:
        """Bytes for activations: a model's calls run one after another, so its contexts can share
        the memory of the largest. None unless the builder reported all of them."""
        sizes = [profile.memory for profile in self.profiles if profile.memory is not None]
        return max(sizes) if sizes and len(sizes) == len(self.profiles) else None

    @property
    def compiled_files(self) -> list[str]:
        """The compiled files, which the graphs folder does not have."""
        return [self.file] if self.encoder is None else [self.file, self.encoder]


@dataclass(frozen=True)
class CallBits:
    """Which calls of the target give bitwise equal logits, as measured.

    widths: numbers of tokens per call that agree with each other; others: those that do not.
    neighbours, threads, rows: whether a call gives the same result alone and with neighbours, with
    one thread and with all, and with room for few rows and for many.
    """

    widths: Annotated[list[SmallCount], Rule("a non-empty list", bool)]
    others: list[SmallCount]
    neighbours: bool
    threads: bool
    rows: bool


@dataclass(frozen=True)
class Invariance:
    """What the target's bitwise results depend on, on the machine that built the bundle.

    processor: of that machine (`machine.processor`). one, several: with one slot and with more.
    slots: whether these two give the same results.
    """

    processor: str
    one: CallBits
    several: CallBits
    slots: bool


@dataclass(frozen=True)
class Manifest:
    """A bundle: the pair, the backend it was built for, and every file with its hash.

    engines: by role; None if the backend runs the graphs, which the bundle then contains.
    invariance: None if it was not measured, for example on a GPU.
    """

    name: str
    backend: str
    versions: dict[str, str]
    slots: Annotated[int, between(1, MAX_SLOTS)]
    pair: Pair
    files: dict[FileName, FileFacts]
    engines: dict[str, EngineFacts] | None = None
    invariance: Invariance | None = None

    def contradiction(self) -> str | None:
        """Which facts are inconsistent; None if none are, as in any file that `engines/` wrote."""
        pair, models = self.pair, dict(self.pair.models())
        rows = pair.max_len + pair.max_gamma + 1
        needed = {f"tokenizer/{TOKENIZER_FILE}"}
        if pair.tokenizer.chat_template:
            needed.add(f"tokenizer/{TEMPLATE_FILE}")
        files = copied_files(pair, self.engines)
        for role, facts in models.items():
            code = [HOST_FILE if facts.has_host_weights else GRAPH_FILE]
            code += [ENCODER_FILE] if facts.encoder else []
            if self.engines and (engine := self.engines.get(role)):
                code = engine.compiled_files
                for name in (f"{role}/{file}" for file in code):  # not among the pair's files
                    files[name] = self.files.get(name, FileFacts(-1, ""))
            needed |= {f"{role}/{name}" for name in (*code, *self.weight_files(role))}
        consistent = {
            "its engines": self.engines is None
            or {role: engine.encoder is not None for role, engine in self.engines.items()}
            == {role: facts.encoder is not None for role, facts in models.items()},
            "its files": files == self.files and needed <= files.keys(),
            "its sizes": all(rows <= pair.capacity == facts.capacity for facts in models.values()),
            "its vocabulary": pair.vocab_size <= pair.target.vocab_size,
            "its caches": all(
                len(facts.key_shapes) == len(facts.value_shapes) > 0 for facts in models.values()
            ),
            "its encoders": all(
                (facts.encoder is None) == (pair.start_ids is None)
                and facts.reads == pair.target.reads
                for facts in models.values()
            ),
            "its audio": pair.is_audio_consistent(),
        }
        return next((what for what, holds in consistent.items() if not holds), None)

    def weight_files(self, role: str) -> list[str]:
        """The files in a model's folder that contain its weights and those of its encoder."""
        facts, engine = dict(self.pair.models())[role], (self.engines or {}).get(role)
        own = HOST_WEIGHTS_FILE if facts.has_host_weights else WEIGHTS_FILE
        if engine:
            own = engine.weights or engine.file
        return [own, ENCODER_WEIGHTS_FILE] if facts.encoder else [own]

    def without_draft(self) -> Manifest:
        """The manifest without the draft model, to open only the target."""
        engines = self.engines and {"target": self.engines["target"]}
        return replace(self, pair=replace(self.pair, draft=None), engines=engines)

    @property
    def activation_bytes(self) -> int | None:
        """Bytes of all engines together; None without engines, or if one of them is unknown."""
        sizes = [engine.activation_bytes for engine in (self.engines or {}).values()]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and known == sizes else None

    def gpu_targets(self) -> list[str]:
        """The GPU architectures that the engines were compiled for, such as sm89."""
        engines = (self.engines or {}).values()
        targets = {target for engine in engines for target in engine.targets}
        return sorted((t for t in targets if t.startswith("sm")), key=lambda t: int(t[2:]))

    def rebuild_command(self, out: Path, gpu: str | None = None) -> str:
        """The command that rebuilds this bundle, for error messages. gpu: an architecture to add,
        such as sm89, or the only one if a bundle can have only one."""
        pair = self.pair
        level = next((engine.level for engine in (self.engines or {}).values()), None)
        targets, added = {*self.gpu_targets()}, {gpu} if gpu else set[str]()
        chips = {  # TensorRT builds for the GPU that is present
            "tensorrt_rtx": sorted((t.removeprefix("sm") for t in targets | added), key=int),
            "aotinductor": [t.removeprefix("sm") for t in added or targets] or ["cpu"],
        }.get(self.backend, [])
        # Without them the weights depend on the checkpoint and the backend.
        weights = {role: facts.weights or "full" for role, facts in pair.models()}
        variables = {  # those that are None are left out
            "MODEL": f"<{pair.target.source}>",
            "DRAFT": f"<{pair.draft.source}>" if pair.draft else pair.lookup or "none",
            "BACKEND": self.backend,
            "DTYPE": pair.target.dtype,
            "WEIGHTS": weights["target"],
            "BITS": f"{pair.target.bits:g}" if pair.target.bits else None,
            "DRAFT_WEIGHTS": weights.get("draft"),
            "CACHE": pair.target.cache,
            "SM": ",".join(chips) or None,
            "OPT_LEVEL": level,
            "MAX_LEN": pair.max_len,
            "MAX_GAMMA": pair.max_gamma,
            "SLOTS": self.slots,
            "OUT": out,
        }
        given = (f"{name}={value}" for name, value in variables.items() if value is not None)
        return "make engines " + " ".join(given)


def copied_files(pair: Pair, engines: dict[str, EngineFacts] | None) -> dict[str, FileFacts]:
    """The files that a bundle copies from the graphs folder, without those whose contents are
    in its engines."""
    if not engines:
        alone = {
            f"{role}/{file}"
            for role, facts in pair.models()
            if facts.has_host_weights
            for file in (GRAPH_FILE, WEIGHTS_FILE)
        }
        return {name: file for name, file in pair.all_files().items() if name not in alone}
    beside = {f"{role}/{engine.weights}" for role, engine in engines.items()}
    beside |= {f"{r}/{ENCODER_WEIGHTS_FILE}" for r, engine in engines.items() if engine.encoder}
    return {
        name: file
        for name, file in pair.all_files().items()
        if name.startswith("tokenizer/") or name in beside
    }


_BUILD_REMEDY = "Build the bundle with make engines MODEL=<target> DRAFT=<draft> OUT=<folder>."


def read_bundle(folder: Path, *, verify: bool = True) -> Manifest:
    """Read and validate a bundle's manifest and (unless verify=False) the hash of every file.

    Raises OutriderError "bundle".
    """
    path = folder / MANIFEST_FILE
    with convert_read_errors(folder, _BUILD_REMEDY):
        if not folder.is_dir():
            raise OutriderError("bundle", f"{folder} is not a folder", _BUILD_REMEDY)
        if not path.is_file():
            other = (folder / "config.json").is_file()
            what = "a Hugging Face checkpoint" if other else "not a bundle"
            named = "the current folder (or an empty path)" if folder == Path() else folder
            cause = f"{named} is {what}: it has no {MANIFEST_FILE}"
            raise OutriderError("bundle", cause, _BUILD_REMEDY)
    manifest = read_json(path, "manifest", Manifest, _BUILD_REMEDY)
    if (mismatch := manifest.contradiction()) is not None:
        cause = f"{path} contradicts itself about {mismatch}: it was edited"
        raise OutriderError("bundle", cause, _BUILD_REMEDY)
    verify_files(folder, manifest.files, contents=verify, remedy=_BUILD_REMEDY)
    return manifest


def verify_hashes(folder: Path, manifest: Manifest, *, weights: bool) -> None:
    """Verify the hashes of the files that contain only numbers, or of all others. The former are
    safe to open even if damaged: the results are wrong, but no code in them is run. An engine that
    contains its weights is among the latter. Raises OutriderError "bundle"."""
    kinds = (WEIGHTS_FILE, HOST_WEIGHTS_FILE, ENCODER_WEIGHTS_FILE)
    numbers = {f"{role}/{file}" for role, _ in manifest.pair.models() for file in kinds}
    files = {name: f for name, f in manifest.files.items() if (name in numbers) == weights}
    verify_files(folder, files, contents=True, remedy=_BUILD_REMEDY)
