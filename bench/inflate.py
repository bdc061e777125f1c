"""Checkpoints that cost what a large model costs and say what a small one says.

A small trained pair does not have the costs of real models, and random weights have no acceptance.
So a trained Llama is grown to a given shape without changing its function: what is new computes and
adds nothing (`bench/inflate_weights.py` says how). With --draft, a draft is made that agrees with a
checkpoint as often as is wanted (`bench/inflate_draft.py`).

Before the folder takes its place it is loaded as any other checkpoint, and all logits of text that
the original wrote are compared. Progress goes to stderr, one JSON line with the figures to stdout.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.files.errors import CommandParser, OutriderError, run_command
from runtime.files.folders import refuse_foreign, write_folder
from runtime.files.progress import note, size_text, stage

from .core.pair import Shape
from .models import TARGET
from .suites.gpu.constructed import LLAMA_1B

SHAPES = {
    "smollm-135m": TARGET,
    "0.5b": Shape(896, 4864, 24, 14, 2, 151_936),  # Qwen2.5-0.5B, but for the biases of its q, k, v
    "1b": LLAMA_1B,
}
TOLERANCE = 1e-4  # relative to 1 + the largest logit, as the exporter's for float32
TEXTS, LENGTH = 4, 64  # compared
SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class Grown:
    """What was written, and how it compares with the original.

    positions: rows of logits compared. difference, largest: of the old tokens' logits. leak: of the
    probability of all new tokens together the largest, as its logarithm to base 10; None without.
    """

    parameters: int
    bytes: int
    positions: int
    difference: float
    largest: float
    leak: float | None


def grow(source: str, out: Path, sizes: dict[str, int], *, seed: int = 0) -> Grown:
    """Write the checkpoint `source` with other sizes to `out`, which must be new or empty.

    sizes: fields of its configuration, those of `inflate_weights.OPTIONS`; others stay.
    Raises OutriderError "checkpoint", "architecture", "option", "disk", "difference".
    """
    from .inflate_weights import Growth, grown_config

    refuse_foreign(out, "config.json")
    with stage("grow", "load"):
        folder, model = load(source)
        config = grown_config(model.config, sizes)
    with stage("grow", "listen to the original") as said:
        texts = _own_texts(model, min(LENGTH, config.max_position_embeddings), seed)
        reference, rms = _listen(model, texts)
        growth = Growth(model, config, rms, seed)
        said.note = f"{texts.numel()} tokens, largest final rms {rms:.3g}"
    with write_folder(out, "config.json") as partial:
        with stage("grow", "write") as said:
            _check_space(partial, 4 * growth.parameters)
            size = write_checkpoint(growth.tensors(), config, folder, partial)
            _name_tokens(partial, range(model.config.vocab_size, config.vocab_size))
            said.note = f"{growth.parameters / 1e6:,.1f} M parameters, {size_text(size)}"
        with stage("grow", "compare with the original") as said:
            _, grown = load(str(partial))
            figures = _compare(reference, _listen(grown, texts)[0])
            result = Grown(growth.parameters, size, texts.numel(), *figures)
            said.note = f"largest difference {result.difference:.1e} at {result.largest:.1f}"
            if result.leak is not None:
                said.note += f", new tokens get 1e{result.leak:.0f}"
        if not result.difference <= TOLERANCE * (1 + result.largest):
            raise OutriderError(
                "difference",
                f"a logit of the grown checkpoint differs by {result.difference:.1e}",
                "Please report this checkpoint's config.json and the command line.",
            )
    return result


def load(source: str) -> tuple[Path, Any]:
    """Folder and float32 model of a checkpoint. Raises OutriderError "checkpoint", "architecture"
    where it is no plain Llama."""
    import torch

    from export.checkpoint import find, refuse_architecture
    from export.loading import load

    checkpoint = find(source)
    config: Any = checkpoint.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise refuse_architecture(source, config, "this tool knows Llamas without biases only")
    return checkpoint.path, load(checkpoint, torch.float32)


def _own_texts(model: Any, length: int, seed: int) -> Any:
    """int64 [TEXTS, length], written by the model at temperatures from 0 to 1."""
    import torch

    from models.measure import sample

    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(model.config.vocab_size, (TEXTS, 1), generator=generator)
    return sample(model, first, length, torch.linspace(0, 1, TEXTS), generator)


def _listen(model: Any, texts: Any) -> tuple[list[Any], float]:
    """The logits [N, V] of each text, and the largest rms that the final norm divides by."""
    import torch

    seen: list[float] = []

    def look(_: object, inputs: tuple[Any, ...]) -> None:
        seen.append(float(inputs[0].square().mean(-1).sqrt().max()))

    hook = model.model.norm.register_forward_pre_hook(look)
    with torch.no_grad():
        logits = [model(text[None], use_cache=False).logits[0] for text in texts]
    hook.remove()
    return logits, max(seen)


def _compare(old: Sequence[Any], new: Sequence[Any]) -> tuple[float, float, float | None]:
    """`Grown`'s difference, largest and leak, of logits [N, V] and [N, V'] of each text."""
    tokens = old[0].shape[1]
    difference = max(float((b[:, :tokens] - a).abs().max()) for a, b in zip(old, new, strict=True))
    largest = max(float(a.abs().max()) for a in old)
    if new[0].shape[1] == tokens:
        return difference, largest, None
    shares = [b.double().log_softmax(-1)[:, tokens:].logsumexp(-1).max() for b in new]
    return difference, largest, float(max(shares)) / math.log(10)


def _check_space(folder: Path, size: int) -> None:
    """Before minutes of work, not after them."""
    if (free := shutil.disk_usage(folder).free) < size:
        raise OutriderError(
            "disk",
            f"{folder.parent} has {size_text(free)} free, and this takes {size_text(size)}",
            "Free some space, or write to another disk.",
        )


def write_checkpoint(
    tensors: Iterator[tuple[str, Any]], config: Any, source: Path, folder: Path
) -> int:
    """Fill `folder`: weights in shards, of which one is in memory; configuration; and all else that
    `source` holds. Returns the weights' bytes."""
    from safetensors.torch import save_file

    shard: dict[str, Any] = {}
    places: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor
        total += tensor.nbytes
        if sum(kept.nbytes for kept in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.save_pretrained(folder)
    for path in source.iterdir():
        weights = path.name.endswith((".safetensors", ".bin", ".index.json"))
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    return total


def _name_tokens(folder: Path, ids: range) -> None:
    """Give new ids names, which no merge makes: an id without one is masked before sampling, and
    sampling would cost what the old ids cost."""
    if not ids:
        return
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = content.get("model", {}).get("vocab")
    if not isinstance(names, dict):
        note("new ids get no names: tokenizer.json has no vocabulary by name")
        return
    known = {*names.values(), *(token["id"] for token in content.get("added_tokens", []))}
    names.update({f"<inflated{i}>": i for i in ids if i not in known})
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


# The tool


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="python -m bench.inflate",
        description=__doc__,
        epilog="""examples:
  python -m bench.inflate models/target build/target-135m --shape smollm-135m
  python -m bench.inflate models/target build/draft-80 --draft models/target --alpha 0.8
  python -m bench.inflate build/draft-80 build/draft-80-49k --hidden 288 --vocab 49152
  make engines MODEL=build/target-135m DRAFT=build/draft-80-49k OUT=build/pair-135m

The second makes a draft that agrees more often than the trained one (0.62): noise only takes away,
so it starts from the target, which is small before it is grown. The third gives it the vocabulary
of the first, without which the pair works too and a draft step costs less than a real one.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a folder in the Hugging Face layout: a Llama")
    add("out", type=Path, metavar="OUT", help="folder to write; new or empty")
    add("--shape", choices=SHAPES, help="grow to this shape, but for the options below")
    for option, what in {
        "layers": "decoder layers",
        "hidden": "width of the residual stream",
        "inter": "width of the MLP",
        "heads": "query heads",
        "kv-heads": "key/value heads",
        "head-dim": "of a head, a multiple of the checkpoint's",
        "vocab": "tokens; more of them need three more hidden channels",
    }.items():
        add(f"--{option}", type=int, metavar="N", help=what)
    add("--draft", metavar="DIR", help="write a draft for CHECKPOINT instead: this one with noise")
    add(
        "--alpha", type=float, metavar="A", help="its acceptance at temperature 1, on held-out text"
    )
    add("--text", type=Path, action="append", metavar="FILE", help="the text; repeatable (default: "
        "files of Python's library that the bundled pair was not trained on)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of all random weights; default 0")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    growth = {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden,
        "intermediate_size": args.inter,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab,
    }
    sizes = {field: size for field, size in growth.items() if size is not None}
    if args.shape:
        shape = asdict(SHAPES[args.shape])
        sizes = {**shape, "head_dim": shape["hidden_size"] // shape["num_attention_heads"], **sizes}
    drafting = args.draft is not None or args.alpha is not None
    if drafting == bool(sizes) or (drafting and None in (args.draft, args.alpha)):
        raise OutriderError(
            "option", "a shape or sizes, or --draft and --alpha, are needed", "See --help."
        )
    if args.text and not drafting:
        raise OutriderError("option", "--text goes with --draft", "Leave it out.")
    import transformers

    library: Any = transformers
    library.logging.disable_progress_bar()
    library.logging.set_verbosity_error()
    if drafting:
        from .inflate_draft import blur

        result: Any = blur(
            args.checkpoint, args.draft, args.out, args.alpha, texts=args.text, seed=args.seed
        )
    else:
        result = grow(args.checkpoint, args.out, sizes, seed=args.seed)
    print(json.dumps({"checkpoint": args.out.name, **asdict(result)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
