"""Opening a bundle: on which device, whether it fits there, and what runs its rounds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from threading import Thread

from . import host
from .backends.bits import Bits, promised
from .backends.registry import host_engine
from .decoder import Decoder
from .files.errors import OutriderError, is_whole, refuse_first
from .files.machine import host_memory
from .files.manifest import (
    FIRST_ROWS,
    MANIFEST_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Manifest,
    read_bundle,
    verify_part,
)
from .files.progress import size_text
from .files.records import readable
from .sequence import Rounds
from .text.engine import TextEngine
from .text.line import QUEUE, TIMEOUT, check_line
from .text.tokenizer import Tokenizer


def load(
    folder: str | Path,
    *,
    slots: int | None = None,
    threads: int = 0,
    verify: bool = True,
    device: str = "auto",
    graphs: bool = True,
    loop: bool = False,
    table: str | Path | None = None,
    corpus: str | Path | None = None,
    reuse: bool = True,
    queue: int = QUEUE,
    timeout: float | None = TIMEOUT,
    plain_width: int | None = None,
    draft_model: bool = True,
) -> TextEngine:
    """Open a bundle.

    folder: what `make engines` wrote. slots: sequences at a time; None takes the bundle's.
    threads: of each model's engine on the CPU; 0 leaves it to the backend. verify: check every
    file's hash. device: "cpu", "cuda" or "cuda:<number>"; "auto" is what the bundle was compiled
    for, and the CPU for one that runs on both. graphs: replay a GPU's rounds as CUDA graphs; False
    launches each call by itself, to find out what they bring. loop: let a GPU go on to the next
    round by itself, a whole text as one launch; not measured yet. table: the file of `python -m
    export.ngram`, for draft="unigram", "bigram" and "skip". corpus: a text, UTF-8, in which
    draft="ngram", "copy" and "chain" look after the text itself. reuse: compute of a prompt only
    what no slot still holds, on the CPU; a GPU computes all of it. queue, timeout: how many calls
    may wait for a slot, and for how many seconds; see `TextEngine`. plain_width: tokens of the
    target's narrowest calls, plain steps above all; None for as many as it takes to have the bits
    of wider ones. 1 is a few percent faster in plain decoding, and a text is then the same only for
    the same gamma. draft_model: False leaves the draft model closed, whose memory lookups and plain
    decoding have no use for; a text that names no draft is then decoded plainly. Raises
    OutriderError: "bundle", "backend", "option", "memory", "vocabulary".
    """
    check_line(queue, timeout)
    folder = Path(folder)
    with _unreplaced(folder):
        manifest = read_bundle(folder, verify=False)
        if verify:
            verify_part(folder, manifest, weights=False)
        ordinal = choose_device(manifest, folder, device)
        gpu = ordinal is not None
        check_bundle(manifest, folder, gpu=gpu)
        check_options(
            gpu=gpu, graphs=graphs, loop=loop, files=table or corpus, threads=threads,
            plain_width=plain_width,
        )  # fmt: skip
        slots = manifest.slots if slots is None else slots
        opened = manifest if draft_model else manifest.without_draft()
        check_slots(opened, slots, gpu=gpu)
        tokenizer = _tokenizer(manifest, folder)
        memory = _memory(opened, slots)
        # A GPU's libraries choose by width: nobody has measured when.
        bits = Bits() if gpu else _bits(manifest, slots, plain_width)
        rounds: Rounds
        with _verifying(folder, opened) if verify else nullcontext():
            if ordinal is None:
                rounds = host.open_rounds(
                    opened, folder, slots, tokenizer, bits,
                    threads=threads, table=table, corpus=corpus, reuse=reuse,
                )  # fmt: skip
            else:
                from .gpu import opening  # what a GPU needs is imported where there is one

                rounds = opening.open_rounds(
                    opened, folder, opening.open_device(manifest, folder, ordinal), slots, memory,
                    graphs=graphs, loop=loop,
                )  # fmt: skip
        pair = opened.pair
        decoder = Decoder(
            rounds,
            vocab_size=pair.vocab_size,
            max_len=pair.max_len,
            max_gamma=pair.max_gamma,
            draft_max_len=pair.draft.max_len if pair.draft else None,
            context=pair.target.context,
        )
        return TextEngine(
            manifest, tokenizer, decoder, memory, queue=queue, timeout=timeout, bits=bits
        )


@contextmanager
def _unreplaced(folder: Path) -> Iterator[None]:
    """Another process may build the bundle again meanwhile: then what was read belongs to two."""
    before = _identity(folder)
    try:
        yield
    except (OutriderError, OSError):
        if _identity(folder) == before:
            raise
    else:
        if _identity(folder) == before:
            return
    cause = f"{folder} was replaced while it was being opened"
    raise OutriderError("bundle", cause, "Open it again.") from None


def _identity(folder: Path) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        found = (folder / MANIFEST_FILE).stat()
        return found.st_ino, found.st_mtime_ns
    return None


@contextmanager
def _verifying(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Verify the weights' hashes beside what is done within: they take as long as opening them."""
    found: list[Exception] = []

    def verify() -> None:
        try:
            verify_part(folder, manifest, weights=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised in the caller's thread
            found.append(error)

    thread = Thread(target=verify, daemon=True)  # an interrupt waits for no hash
    thread.start()
    try:
        yield
    except Exception:
        thread.join()
        if found:  # damage explains whatever went wrong with it
            raise found.pop() from None  # kept, it would keep the engines in a cycle
        raise
    thread.join()
    if found:
        raise found.pop()


def choose_device(manifest: Manifest, folder: Path, device: str) -> int | None:
    """The number of the GPU to run on, None for the CPU. Raises OutriderError "option"."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", str(device)):
        raise OutriderError(
            "option", f"device={device!r} is unknown", "Use auto, cpu, cuda or cuda:<number>."
        )
    kind, _, number = str(device).partition(":")
    runs_on = ["cpu", "cuda"]  # the portable graphs
    if any(
        facts.host_alone or facts.encoder or facts.states for _, facts in manifest.pair.models()
    ):
        runs_on = ["cpu"]
    elif manifest.engines is not None:
        runs_on = ["cuda"] if manifest.gpu_targets() else ["cpu"]
    if kind == "auto":
        kind = runs_on[0]
    if kind not in runs_on:
        backend = "onnxruntime." if kind == "cpu" else "tensorrt_rtx, on or for a GPU."
        raise OutriderError(
            "option",
            f"device={device}: {folder} was compiled for "
            f"{', '.join(manifest.gpu_targets()) or 'the CPU'}",
            f"Leave the device out, or build with BACKEND={backend}",
        )
    return int(number or 0) if kind == "cuda" else None


def check_bundle(manifest: Manifest, folder: Path, *, gpu: bool) -> None:
    """Refuse, before anything is loaded, engines that this version does not run.

    An engine belongs to the version of the library that made it. Raises OutriderError "backend".
    """
    for package, built in manifest.versions.items() if manifest.engines else ():
        installed = _installed(package)
        if installed not in (None, built):
            raise OutriderError(
                "backend",
                f"{folder} was built with {package} {built}, and {installed} is installed",
                f"Build it again: {manifest.rebuild_command(folder)}",
            )
    if not gpu:
        host_engine(manifest.backend).check(manifest, folder)


def check_options(
    *, gpu: bool, graphs: bool, loop: bool, files: object, threads: int, plain_width: int | None
) -> None:
    """Refuse what the device does not honour. files: a table or corpus, where one is given. Raises
    OutriderError "option"."""
    most_threads = 0 if gpu else 4 * (os.cpu_count() or 1)
    refuse_first([
        (loop and not (gpu and graphs), "loop is for a GPU's CUDA graphs",
         "Leave it out, or graphs on, or use a bundle for a GPU."),
        (not (graphs or gpu), "graphs are of a GPU, and this runs on the CPU",
         "Leave the option out."),
        (gpu and files, "table and corpus are for the CPU in this version",
         "Leave them out, or use a bundle that runs on the CPU."),
        (not (is_whole(threads) and 0 <= threads <= most_threads),
         f"threads={threads!r} is out of range" + (" on a GPU" if gpu else ""),
         "Leave it out: it is of a CPU's engines." if gpu else
         f"Use 0 (automatic) to {most_threads}."),
        (plain_width is not None and gpu, f"plain_width={plain_width} is for the CPU",
         "Leave it out."),
        (plain_width is not None and not (is_whole(plain_width) and plain_width in (1, 2)),
         f"plain_width={plain_width!r} is out of range",
         "Use 1 or 2, or leave it out."),
    ])  # fmt: skip


def check_slots(manifest: Manifest, slots: int, *, gpu: bool) -> None:
    """Refuse slots that cannot be: what they need before any text is long is more than there is.

    On a GPU `gpu.opening` holds them against its memory. Raises OutriderError "option", "memory".
    """
    if not is_whole(slots) or slots < 1:
        raise OutriderError(
            "option", f"slots={slots!r} is out of range", "Use a whole number from 1 up."
        )
    pair = manifest.pair
    need = sum(facts.cache_bytes(slots, FIRST_ROWS) for _, facts in pair.models())
    need += pair.logits_bytes(slots, gpu=False)
    have = host_memory()
    if not gpu and need > have > 0:
        raise OutriderError(
            "memory",
            f"{slots:,} slots need {size_text(need)}, and this machine has {size_text(have)}",
            "Use fewer slots, or a narrower beam.",
        )


def _installed(package: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _tokenizer(manifest: Manifest, folder: Path) -> Tokenizer:
    facts, template = manifest.pair.tokenizer, None
    if facts.chat_template:
        path = folder / "tokenizer" / TEMPLATE_FILE
        with readable(path, f"Build it again: {manifest.rebuild_command(folder)}"):
            template = path.read_text(encoding="utf-8")
    return Tokenizer(
        folder / "tokenizer" / TOKENIZER_FILE,
        chat_template=template,
        special_tokens=facts.special_tokens,
    )


def _bits(manifest: Manifest, slots: int, plain_width: int | None) -> Bits:
    """Look up what texts on the CPU do not depend on, which was measured with these libraries."""
    other = next(
        (
            f"{package} {built}, and {_installed(package) or 'none'} is installed"
            for package, built in manifest.versions.items()
            if _installed(package) != built
        ),
        "",
    )
    return promised(manifest, slots, host_engine(manifest.backend).least_width, other, plain_width)


def _memory(manifest: Manifest, slots: int) -> dict[str, int]:
    """Bytes of the models' weights and of all slots' caches."""
    memory = {}
    for role, facts in manifest.pair.models():
        names = manifest.weight_files(role)
        memory[role] = sum(manifest.files[f"{role}/{name}"].size for name in names)
        memory["cache"] = memory.get("cache", 0) + facts.cache_bytes(slots)
    return memory
