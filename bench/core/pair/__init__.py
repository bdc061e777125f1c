"""Pairs for benchmarks: checkpoints with the costs of real models, and bundles of them.

A small trained pair does not have the costs of real models, and random weights do not give a
realistic acceptance rate. So the bundled target is grown to a real model's shape without changing
its output (`grow`), and a draft is made that agrees with it at about the requested rate (`blur`).
There is no trained encoder-decoder at hand, so those have random weights and a known output
(`seq2seq`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.files.errors import OutriderError, refuse_first
from runtime.files.graphs import TOKENIZER_FILE

from ..cache import cached_folder, run_module
from ..machine import CHECKOUT
from .shapes import SEQ2SEQ, SHAPES, Seq2SeqShape, Shape

__all__ = [
    "SEQ2SEQ", "SHAPES", "Pair", "Seq2SeqShape", "Shape", "build_bundle", "bundle_sources",
    "from_checkpoints", "make",
]  # fmt: skip

TARGET, DRAFT = CHECKOUT / "models" / "target", CHECKOUT / "models" / "draft"
BUILDERS = "export", "engines", "runtime/files"  # code that bundles depend on
DRAFT_HIDDEN = 288  # a larger vocabulary needs three more channels than the bundled target has


@dataclass(frozen=True)
class Pair:
    """A pair of checkpoints. shape: name of the shape that they were made in; for a user's own
    checkpoints their names. alpha: requested acceptance rate; None for a user's own. context:
    maximum length of a text in tokens."""

    target: Path
    draft: Path | None
    shape: str
    alpha: float | None
    context: int = 1 << 20


def from_checkpoints(target: Path, draft: Path | None) -> Pair:
    """A user's checkpoints. Raises OutriderError, also for checkpoints that the other systems
    cannot read."""
    from export.checkpoint import find  # imported here because it imports Transformers

    # Resolved, because conversions by other systems are cached under the folders' names.
    paths = [path.resolve() if path.exists() else path for path in (target, draft) if path]
    found = [find(str(path)) for path in paths]
    names = [each.path.name for each in found]
    refuse_first([
        (len({*names}) < len(names), f"both folders are named {names[0]}", "Rename one of them."),
    ])  # fmt: skip
    for each in found:
        refuse_first([
            (each.has_encoder, f"{each.source} is an encoder-decoder, which needs other inputs",
             "Measure a similar shape: --shape t5-base or whisper-small."),
            (each.gguf is not None, f"{each.source} is a GGUF file, which not all systems can read",
             "Use a folder in the Hugging Face layout."),
            (not list(each.path.glob("*.safetensors")), f"{each.source} has no safetensors file",
             "Save it with Transformers, which writes one."),
            (not (each.path / TOKENIZER_FILE).is_file(), f"{each.source} has no {TOKENIZER_FILE}",
             "Save its tokenizer with Transformers."),
        ])  # fmt: skip
    context = min(each.max_len for each in found)
    return Pair(found[0].path, found[1].path if draft else None, " and ".join(names), None, context)


def make(shape: str, alpha: float, work: Path) -> Pair:
    """A target in that shape and a draft with acceptance rate alpha, built unless they exist.

    For `SHAPES`, the target is the bundled one, grown. The draft is the bundled target with noise,
    grown only to the larger vocabulary, so it costs as much as a small model with a large
    vocabulary. Raises OutriderError("option") if alpha is not between 0 and 1, and the errors of
    `grow.grow`, `blur.blur` and `seq2seq.write`.
    """
    from . import seq2seq
    from .blur import blur
    from .grow import grow

    if not 0 < alpha < 1:
        cause = f"the acceptance rate {alpha:g} is out of range"
        raise OutriderError("option", cause, "Use a value between 0 and 1.")
    target, draft = work / shape, work / f"{shape}-draft-{alpha:g}"
    blurred = work / f"blurred-{alpha:g}"
    if shape in SHAPES:
        sizes = asdict(SHAPES[shape])
        if not target.is_dir():
            grow(TARGET, target, sizes)
        if not draft.is_dir():
            if not blurred.is_dir():
                blur(TARGET, blurred, alpha)
            more = {"vocab_size": sizes["vocab_size"], "hidden_size": DRAFT_HIDDEN}
            grow(blurred, draft, more)
    elif not draft.is_dir():
        seq2seq.write(SEQ2SEQ[shape], alpha, target, draft)
    return Pair(target, draft, shape, alpha)


def bundle_sources(
    target: Path, draft: Path | None, work: Path, *, max_len: int, precision: str = "float32"
) -> tuple[Path, list[Path]]:
    """The folder of a pair's bundle, and the folders that the bundle is built from."""
    named = f"{target.name}-{draft.name if draft else 'none'}-{max_len}-{precision}"
    models = [target, draft] if draft else [target]
    return work / "bundles" / named, [*models, *(CHECKOUT / room for room in BUILDERS)]


def build_bundle(
    target: Path, draft: Path | None, work: Path, *, max_len: int, precision: str = "float32"
) -> Path:
    """A pair's bundle, as `make engines` builds it, in `work`; built unless it exists.

    precision: int8 or int4 for quantised weights in float32 graphs; "mixed" for a float32 target
    with an int8 draft, the default of `make engines`; or float32 for both. Raises OutriderError as
    `run_module` does.
    """
    folder, sources = bundle_sources(target, draft, work, max_len=max_len, precision=precision)

    def make() -> None:
        graphs = work / "graphs" / folder.name
        models = ["--model", target, "--draft", draft or "none", "--cache", work / "cache"]
        weights = ["--weights", "full" if precision in ("float32", "mixed") else precision]
        if precision == "float32" and draft:
            weights += ["--draft-weights", "full"]
        run_module("export", *models, *weights, "--out", graphs, "--max-len", max_len)
        run_module("engines", "--graphs", graphs, "--out", folder)

    return cached_folder(folder, sources, make)
