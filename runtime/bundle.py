"""Opens a bundle: chooses the device, checks that the bundle fits, and sets up its rounds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from threading import Thread

from . import host
from .backends.bits import Bits, promised_bits
from .backends.registry import host_engine
from .decoder import Decoder
from .files.errors import (
    FLAG,
    INTEGER,
    PATH,
    OutriderError,
    check_value,
    refuse_first,
    shown_value,
)
from .files.graphs import TEMPLATE_FILE, TOKENIZER_FILE
from .files.machine import host_memory
from .files.manifest import FIRST_ROWS, MANIFEST_FILE, Manifest, read_bundle, verify_hashes
from .files.progress import size_text
from .files.records import convert_read_errors
from .sampling import kernel
from .sequence import Rounds
from .text.chat import read_template
from .text.engine import TextEngine
from .text.requests import decoders_only
from .text.slot_queue import DEFAULT_QUEUE, DEFAULT_TIMEOUT, check_queue_options
from .text.tokenizer import Tokenizer


def load(
    folder: str | Path,
    *,
    slots: int | None = None,
    threads: int = 0,
    verify: bool = True,
    device: str = "auto",
    graphs: bool = True,
    table: str | Path | None = None,
    corpus: str | Path | None = None,
    chat_template: str | Path | None = None,
    reuse: bool = True,
    queue: int = DEFAULT_QUEUE,
    timeout: float | None = DEFAULT_TIMEOUT,
    plain_width: int | None = None,
    draft_model: bool = True,
) -> TextEngine:
    """Open a bundle.

    folder: the bundle written by `make engines`.
    slots: number of sequences decoded at a time; None for the bundle's.
    threads: CPU threads per model; 0 leaves it to the backend.
    verify: check every file's hash.
    device: "cpu", "cuda" or "cuda:<number>"; "auto" is the device that the bundle was compiled for,
        and the CPU if it runs on both.
    graphs: replay a GPU's rounds as CUDA graphs; False launches each call separately, to measure
        the gain.
    table: the file written by `python -m export.ngram`, for draft="unigram", "bigram" and "skip".
    corpus: a UTF-8 text file that draft="ngram", "copy" and "chain" search after the text itself.
    chat_template: a file with the Jinja source of a chat template, which replaces the checkpoint's.
    reuse: compute only the part of a prompt that no slot still holds. On the CPU; a GPU computes
        all of it.
    queue, timeout: how many calls may wait for a slot, and for how many seconds; see `TextEngine`.
    plain_width: number of tokens in the target's narrowest calls, mainly plain steps; None for the
        smallest number that gives bitwise the same results as wider calls. 1 makes plain decoding a
        few percent faster, but the output is then the same only for the same gamma.
    draft_model: False does not load the draft model, which saves its memory if only lookups or
        plain decoding are used; a request that names no draft is then decoded plainly.

    Raises OutriderError: "bundle", "backend", "option", "memory", "vocabulary".
    """
    check_queue_options(queue, timeout)
    files = {"table": table, "corpus": corpus, "chat_template": chat_template}
    given = {name: path for name, path in files.items() if path is not None}
    for name, path in {"folder": folder, **given}.items():
        check_value(name, path, PATH)
    flags = {"verify": verify, "graphs": graphs, "reuse": reuse, "draft_model": draft_model}
    for name, flag in flags.items():
        check_value(name, flag, FLAG)
    template = None if chat_template is None else read_template(Path(chat_template))
    folder = Path(folder)
    with _detect_replacement(folder):
        manifest = read_bundle(folder, verify=False)
        if verify:
            verify_hashes(folder, manifest, weights=False)
        loaded = manifest if draft_model else manifest.without_draft()
        ordinal = choose_device(loaded, folder, device)
        gpu = ordinal is not None
        check_bundle(manifest, folder, gpu=gpu)
        threads, plain_width = check_options(
            gpu=gpu, graphs=graphs, files=table or corpus, threads=threads, plain_width=plain_width
        )
        slots = check_slots(loaded, slots, gpu=gpu)
        tokenizer = _tokenizer(manifest, folder, template)
        memory = _memory(loaded, slots, gpu=gpu)
        # A GPU's libraries choose kernels by width, which has not been measured.
        bits = Bits() if gpu else _bits(manifest, slots, plain_width)
        rounds: Rounds
        with _verify_in_background(folder, loaded) if verify else nullcontext():
            if ordinal is None:
                rounds = host.open_rounds(
                    loaded, folder, slots, tokenizer, bits,
                    threads=threads, table=table, corpus=corpus, reuse=reuse,
                )  # fmt: skip
            else:
                from .gpu import opening  # imported only for a GPU, which its libraries need

                rounds = opening.open_rounds(
                    loaded, folder, opening.open_device(manifest, folder, ordinal), slots, memory,
                    graphs=graphs,
                )  # fmt: skip
        pair = loaded.pair
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
def _detect_replacement(folder: Path) -> Iterator[None]:
    """Raise "bundle" if another process rebuilds the bundle meanwhile: the files that were read may
    then belong to two builds."""
    before = _manifest_identity(folder)
    try:
        yield
    except (OutriderError, OSError):
        if _manifest_identity(folder) == before:
            raise
    else:
        if _manifest_identity(folder) == before:
            return
    cause = f"{folder} was replaced while it was being opened"
    raise OutriderError("bundle", cause, "Open it again.") from None


def _manifest_identity(folder: Path) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        found = (folder / MANIFEST_FILE).stat()
        return found.st_ino, found.st_mtime_ns
    return None


@contextmanager
def _verify_in_background(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Verify the weights' hashes in a thread while the block runs: it takes as long as loading."""
    errors: list[Exception] = []

    def verify() -> None:
        try:
            verify_hashes(folder, manifest, weights=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised in the caller's thread
            errors.append(error)

    thread = Thread(target=verify, daemon=True)  # an interrupt need not wait for it
    thread.start()
    try:
        yield
    except Exception:
        thread.join()
        if errors:  # a damaged file explains the error
            raise errors.pop() from None  # popped: its traceback would keep the engines in a cycle
        raise
    thread.join()
    if errors:
        raise errors.pop()


def choose_device(manifest: Manifest, folder: Path, device: str) -> int | None:
    """The number of the GPU to run on; None for the CPU. Raises OutriderError "option"."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,4})?", str(device)):
        raise OutriderError(
            "option",
            f"device={shown_value(device)} is unknown",
            "Use auto, cpu, cuda or cuda:<number>.",
        )
    kind, _, number = str(device).partition(":")
    runs_on = ["cpu", "cuda"]  # the portable graphs
    only_on_cpu = [
        role
        for role, facts in manifest.pair.models()
        if facts.has_host_weights or facts.encoder or facts.states
    ]
    if only_on_cpu:
        runs_on = ["cpu"]
    elif manifest.engines is not None:
        runs_on = ["cuda"] if manifest.gpu_targets() else ["cpu"]
    if kind == "auto":
        kind = runs_on[0]
    if kind not in runs_on:
        build = f"BACKEND={'onnxruntime' if kind == 'cpu' else 'tensorrt_rtx, on or for a GPU'}"
        pair = manifest.pair
        draft = pair.draft if only_on_cpu == ["draft"] else None
        # By default the draft of a full target is quantised.
        if draft and not draft.states and draft.source != pair.target.source:
            build = "DRAFT_WEIGHTS=full"
        raise OutriderError(
            "option",
            f"device={device}: {folder} was compiled for "
            f"{', '.join(manifest.gpu_targets()) or 'the CPU'}",
            f"Leave the device out, or build with {build}.",
        )
    return int(number or 0) if kind == "cuda" else None


def check_bundle(manifest: Manifest, folder: Path, *, gpu: bool) -> None:
    """Refuse, before anything is loaded, engines that this installation cannot run.

    An engine requires the version of the library that built it. Raises OutriderError "backend".
    """
    for package, built, installed in _other_versions(manifest) if manifest.engines else ():
        # Any build of a version will do: +cpu or +cu130 only names the variant.
        if installed and installed.partition("+")[0] != built.partition("+")[0]:
            raise OutriderError(
                "backend",
                f"{folder} was built with {package} {built}, and {installed} is installed",
                f"Build it again: {manifest.rebuild_command(folder)}",
            )
    if not gpu:
        host_engine(manifest.backend).check(manifest, folder)


def max_threads() -> int:
    """The maximum number of threads of an engine on the CPU."""
    return 4 * (os.cpu_count() or 1)


def check_options(
    *, gpu: bool, graphs: bool, files: object, threads: int, plain_width: int | None
) -> tuple[int, int | None]:
    """`threads` and `plain_width` as Python's own numbers. Refuses options that the device does not
    support. files: the table or corpus, if one is given. Raises OutriderError "option"."""
    refuse_first([
        (not (graphs or gpu), "graphs apply to a GPU, and this runs on the CPU",
         "Leave the option out."),
        (gpu and files, "table and corpus are supported only on the CPU in this version",
         "Leave them out, or use a bundle that runs on the CPU."),
        (gpu and threads != 0, f"threads={threads!r} is out of range on a GPU",
         "Leave it out: it applies to engines on the CPU."),
        (plain_width is not None and gpu, f"plain_width={plain_width} applies only to the CPU",
         "Leave it out."),
    ])  # fmt: skip
    threads = check_value("threads", threads, INTEGER, lambda x: 0 <= x <= max_threads(),
                          f"from 0 (automatic) to {max_threads()}")  # fmt: skip
    if plain_width is not None:
        plain_width = check_value(
            "plain_width", plain_width, INTEGER, lambda x: x in (1, 2), "1 or 2"
        )
    return threads, plain_width


def check_slots(manifest: Manifest, slots: int | None, *, gpu: bool) -> int:
    """The number of slots; None is the bundle's. Refuses more than fit into memory, even with the
    smallest caches.

    On a GPU `gpu.opening` checks them against its memory. Raises OutriderError "option", "memory".
    """
    wanted = manifest.slots if slots is None else slots
    slots = int(check_value("slots", wanted, INTEGER, lambda x: x >= 1, "1 or more"))
    pair = manifest.pair
    need = sum(facts.cache_bytes(slots, FIRST_ROWS) for _, facts in pair.models())
    need += pair.logits_bytes(slots, gpu=False)
    have = host_memory()
    if not gpu and need > have > 0:
        cause = f"{slots:,} slots need {size_text(need)}, and this machine has {size_text(have)}"
        raise OutriderError("memory", cause, "Use fewer slots, or a narrower beam.")
    return slots


def _other_versions(manifest: Manifest) -> Iterator[tuple[str, str, str | None]]:
    """The packages that are not installed as when the bundle was built: name, version then and now,
    None for none. They are not imported."""
    for package, built in manifest.versions.items():
        installed = None
        with suppress(metadata.PackageNotFoundError):
            installed = metadata.version(package)
        if installed != built:
            yield package, built, installed


def _tokenizer(manifest: Manifest, folder: Path, template: str | None) -> Tokenizer:
    """template: the source of a chat template that replaces the checkpoint's."""
    pair, facts = manifest.pair, manifest.pair.tokenizer
    if template is not None and pair.start_ids is not None:
        cause = decoders_only("chat templates", pair)
        raise OutriderError("option", cause, "Leave chat_template out.")
    if facts.chat_template and template is None:
        path = folder / "tokenizer" / TEMPLATE_FILE
        with convert_read_errors(path, f"Build it again: {manifest.rebuild_command(folder)}"):
            template = path.read_text(encoding="utf-8")
    return Tokenizer(
        folder / "tokenizer" / TOKENIZER_FILE,
        chat_template=template,
        special_tokens=facts.special_tokens,
    )


def _bits(manifest: Manifest, slots: int, plain_width: int | None) -> Bits:
    """What the output on the CPU does not depend on, as measured at build time. The measurement
    holds only for the same libraries."""
    others = (f"{package} {built}, and {installed or 'none'} is installed"
              for package, built, installed in _other_versions(manifest))  # fmt: skip
    min_width = host_engine(manifest.backend).default_min_width
    return promised_bits(manifest, slots, min_width, next(others, ""), plain_width)


def _memory(manifest: Manifest, slots: int, *, gpu: bool) -> dict[str, int]:
    """Bytes of each model's weights and of all slots' caches."""
    memory = {}
    for role, facts in manifest.pair.models():
        names = manifest.weight_files(role)
        stored = sum(manifest.files[f"{role}/{name}"].size for name in names)
        memory[role] = facts.loaded_bytes(stored, host=not gpu and kernel.available())
        memory["cache"] = memory.get("cache", 0) + facts.cache_bytes(slots)
    return memory
