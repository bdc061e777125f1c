"""python -m export.ngram: build draft models that are tables of counts from texts.

Counts unigrams, bigrams, and pairs of tokens further apart, and writes them to one file, which
`runtime.generate --table FILE --draft unigram|bigram|skip` reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.files.errors import (
    CommandParser,
    OutriderError,
    convert_errors,
    defer_interrupts,
    run_command,
)
from runtime.files.folders import replacing
from runtime.files.progress import stage
from runtime.files.texts import read_text

if TYPE_CHECKING:
    from runtime.drafts.tables import Tables

DISTANCES = 8
PIECE = 1 << 20  # characters that are tokenized at a time
ZIP = b"PK"  # NumPy's .npz files are ZIP archives


def count(tokenizer_folder: Path, texts: Sequence[Path], distances: int) -> tuple[Tables, int]:
    """Count the tables of these texts; also returns the total number of tokens.

    tokenizer_folder: a checkpoint, or a bundle's `tokenizer` folder. Raises OutriderError
    "checkpoint" or "option".
    """
    with defer_interrupts():
        import numpy as np
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        from runtime.drafts.tables import Tables, fingerprint

    remedy = "Give the target's checkpoint, or a bundle's tokenizer folder."
    if not tokenizer_folder.is_dir():
        raise OutriderError("checkpoint", f"{tokenizer_folder} is not a folder", remedy)
    own = tokenizer_folder / "tokenizer.json"  # a bundle has no other tokenizer file
    tokenizer: Any
    with convert_errors("checkpoint", f"cannot read the tokenizer in {tokenizer_folder}", remedy):
        if own.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(own))  # type: ignore[no-untyped-call]
        else:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    with stage("table", "count tokens") as progress:
        for path in texts:
            text = read_text(path, str(path))
            start = 0
            while start < len(text):
                # Cut at the end of a line, so that few tokens are split in two.
                end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
                ids += tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
                start = end
                progress.phase = f"{min(start, len(text)) / len(text):.0%} of {path.name}"
        if len(ids) <= distances:
            cause = f"the texts have only {len(ids)} tokens"
            raise OutriderError("option", cause, "Give more text.")
        tables = Tables.count(np.array(ids, np.int32), max(vocabulary.values()) + 1, distances)
    tables.tokenizer = fingerprint(vocabulary)
    return tables, len(ids)


def _check_place(path: Path) -> None:
    """Refuse to overwrite a file that is not a table, above all the text itself."""
    if path.exists() and not (path.is_file() and path.open("rb").read(len(ZIP)) == ZIP):
        cause = f"--out {path} exists and is not a table"
        raise OutriderError("option", cause, "Name another file, or remove this one.")


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m export.ngram",
        description="Count the tokens of a text, and pairs of them, to build draft models that "
        "cost next to nothing.",
        epilog="example:\n"
        "  python -m export.ngram --tokenizer build/demo/tokenizer --out code.npz corpus.txt\n"
        "  python -m runtime.generate --engines build/demo --table code.npz --draft bigram "
        "--prompt 'import '",
    )
    add = parser.add_argument
    add("texts", nargs="+", type=Path, metavar="TEXT", help="text files, UTF-8")
    add("--tokenizer", type=Path, required=True, metavar="DIR",
        help="the target's checkpoint, or a bundle's tokenizer folder")  # fmt: skip
    add("--out", type=Path, required=True, metavar="FILE.npz", help="output file")
    add("--distances", type=int, default=DISTANCES, metavar="D",
        help="largest distance between counted pairs, for --draft skip (default: 8)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    if not 1 <= args.distances <= 64:
        raise OutriderError("option", f"distances={args.distances} is out of range", "Use 1 to 64.")
    _check_place(args.out)
    tables, tokens = count(args.tokenizer, args.texts, args.distances)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(args.out) as new:
        tables.save(new)
    pairs = len(tables.pairs[0][1])
    print(
        f"{args.out}: {tokens:,} tokens, {len(tables.unigram):,} in the vocabulary, {pairs:,} "
        f"bigrams, {args.out.stat().st_size / 1e6:.1f} MB",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
