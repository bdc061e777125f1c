"""Pairs to measure: checkpoints that cost what real ones cost, and bundles of them.

A small trained pair does not have the costs of real models, and random weights have no acceptance.
So the bundled target is grown to a real model's shape without changing what it says (`grow`), and a
draft is made that agrees with it about as often as is asked for (`blur`). There is no trained
encoder-decoder, so those are random, and say what is known beforehand (`seq2seq`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.files.errors import OutriderError, refuse_first
from runtime.files.manifest import TOKENIZER_FILE

from ..kept import kept, run_module
from ..machine import CHECKOUT
from .shapes import SEQ2SEQ, SHAPES, Seq2Seq, Shape

__all__ = ["SEQ2SEQ", "SHAPES", "Pair", "Seq2Seq", "Shape", "bundle", "make", "own", "place"]

TARGET, DRAFT = CHECKOUT / "models" / "target", CHECKOUT / "models" / "draft"
BUILDERS = "export", "engines", "runtime/files"  # what a bundle is made by
WEIGHTS = {"float32": [], "mixed": ["--draft-weights", "int8"]}
DRAFT_HIDDEN = 288  # a larger vocabulary takes three channels more than the bundled target has


@dataclass(frozen=True)
class Pair:
    """Folders of checkpoints, the shape that they are made in, the acceptance asked for. Of a
    user's own the shape is their names, and alpha None. context: the longest text, in tokens."""

    target: Path
    draft: Path | None
    shape: str
    alpha: float | None
    context: int = 1 << 20


def own(target: Path, draft: Path | None) -> Pair:
    """A user's checkpoints. Raises OutriderError, also for what other systems do not read."""
    from export.checkpoint import find  # here: Transformers

    # Resolved: what others make of them is kept by their folders' names.
    given = [path.resolve() if path.exists() else path for path in (target, draft) if path]
    found = [find(str(path)) for path in given]
    names = [each.path.name for each in found]
    refuse_first([
        (len({*names}) < len(names), f"both folders are called {names[0]}", "Rename one of them."),
    ])  # fmt: skip
    for each in found:
        refuse_first([
            (each.has_encoder, f"{each.source} is an encoder-decoder, and would need sources",
             "Measure a shape like it: --shape t5-base or whisper-small."),
            (each.gguf is not None, f"{each.source} is a GGUF file, and not all systems read it",
             "Name a folder in the Hugging Face layout."),
            (not list(each.path.glob("*.safetensors")), f"{each.source} has no safetensors file",
             "Save it with Transformers, which writes one."),
            (not (each.path / TOKENIZER_FILE).is_file(), f"{each.source} has no {TOKENIZER_FILE}",
             "Save its tokenizer with Transformers."),
        ])  # fmt: skip
    context = min(each.max_len for each in found)
    return Pair(found[0].path, found[1].path if draft else None, " and ".join(names), None, context)


def make(shape: str, alpha: float, work: Path) -> Pair:
    """A target in that shape, and a draft of acceptance alpha; made unless they are there.

    Of `SHAPES`, the target is the bundled one, and the draft that with noise, as it was before it
    was grown, but with as many tokens: so its cost is that of a small model with a large
    vocabulary. Raises OutriderError "option" for an alpha that is none, and as `grow.grow`,
    `blur.blur` and `seq2seq.write`.
    """
    from . import seq2seq
    from .blur import blur
    from .grow import grow

    if not 0 < alpha < 1:
        cause = f"an acceptance of {alpha:g} is out of range"
        raise OutriderError("option", cause, "Use one between 0 and 1.")
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


def place(
    target: Path, draft: Path | None, work: Path, *, max_len: int, precision: str = "float32"
) -> tuple[Path, list[Path]]:
    """The folder of the bundle of a pair, and the folders that it is made of."""
    named = f"{target.name}-{draft.name if draft else 'none'}-{max_len}-{precision}"
    models = [target, draft] if draft else [target]
    return work / "bundles" / named, [*models, *(CHECKOUT / room for room in BUILDERS)]


def bundle(
    target: Path, draft: Path | None, work: Path, *, max_len: int, precision: str = "float32"
) -> Path:
    """What `make engines` makes of a pair, in `work`, made unless it is there.

    precision: int8 or int4, of the weights of float32 graphs; "mixed" for int8 of the draft's
    alone; or float32. Raises OutriderError "backend"; stderr has said why.
    """
    folder, sources = place(target, draft, work, max_len=max_len, precision=precision)

    def make() -> None:
        graphs = work / "graphs" / folder.name
        models = ["--model", target, "--draft", draft or "none", "--cache", work / "cache"]
        weights = WEIGHTS.get(precision, ["--weights", precision])
        _run("export", *models, *weights, "--out", graphs, "--max-len", max_len)
        _run("engines", "--graphs", graphs, "--out", folder)

    return kept(folder, sources, make)


def _run(module: str, *arguments: object) -> None:
    if said := run_module(module, *arguments):
        cause = f"python -m {module} {said}"
        raise OutriderError("backend", cause, "See what it has said above.")
