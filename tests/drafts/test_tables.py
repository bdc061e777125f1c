"""A table file is either sound or refused in one line, whatever happened to its bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.drafts.tables import Tables, fingerprint
from runtime.files.errors import OutriderError

WORDS = {f"w{i}": i for i in range(40)}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A file as `python -m export.ngram` writes it."""
    text = np.random.default_rng(0).integers(0, len(WORDS), 500).astype(np.int32)
    made = Tables.count(text, len(WORDS), 3)
    made.tokenizer = fingerprint(WORDS)
    made.save(tmp_path / "table.npz")
    return tmp_path / "table.npz"


def is_refused(path: Path, width: int = len(WORDS)) -> bool:
    """Whether the file is refused, in one line that names it; if not, all its rows are finite."""
    try:
        read = Tables.load(path, WORDS, width)
    except OutriderError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.kind in ("option", "vocabulary")
        assert str(path) in refusal.cause and "\n" not in str(refusal)
        return True
    for distance in range(1, len(read.pairs) + 2):
        for token in range(len(WORDS)):
            assert np.isfinite(read.after(token, distance)).all()
    return False


def test_damaged_bytes(table: Path) -> None:
    """Bytes that are flipped, cut off, duplicated or overwritten: zipfile, zlib and NumPy raise
    errors of their own for them. Controls: a sound file, and those that a mutation leaves sound.
    """
    assert not is_refused(table)
    sound, chance = table.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        content = bytearray(sound)
        at = chance.randrange(len(content))
        match chance.randrange(5):
            case 0:
                content[at] ^= 1 << chance.randrange(8)
            case 1:
                del content[at:]
            case 2:
                content[at:at] = content[: chance.randrange(64)]
            case 3:
                content[at : at + 8] = chance.randbytes(8)
            case 4:  # the directory at the end, which lists the positions
                at = len(content) - 1 - chance.randrange(200)
                content[at] = chance.randrange(256)
        table.write_bytes(content)
        refused += is_refused(table)
    assert refused > 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unigram", np.zeros(40)),  # float64
        ("unigram", np.full(40, np.nan, np.float32)),
        ("offsets_1", np.zeros(41, np.int64)),
        ("offsets_2", np.arange(41, dtype=np.int64)[::-1]),
        ("offsets_3", np.zeros(3, np.int64)),
        ("tokens_1", -1),
        ("tokens_2", 40),
        ("counts_1", 0),
        ("unigram", np.zeros(0, np.float32)),
        ("version", np.array(7)),
        ("version", np.array("one")),
    ],
)
def test_arrays_that_are_no_tables(table: Path, name: str, value: Any) -> None:
    """The file is sound, and only its values are wrong."""
    with np.load(table) as file:
        arrays = dict(file)
    np.savez_compressed(table, **arrays)
    assert not is_refused(table)
    if isinstance(value, int):
        arrays[name] = arrays[name].copy()
        arrays[name][-1] = value
    else:
        arrays[name] = value
    np.savez_compressed(table, **arrays)
    assert is_refused(table)


def test_tokens_that_the_model_has_no_row_for(table: Path) -> None:
    """A tokenizer may have more tokens than the model: they are counted, and never drafted."""
    assert not is_refused(table, width=33)
    whole, narrow = (Tables.load(table, WORDS, width) for width in (40, 33))
    for token in range(40):
        np.testing.assert_allclose(narrow.after(token, 1), whole.after(token, 1)[:33], rtol=1e-6)


def test_files_that_are_no_tables(table: Path, tmp_path: Path) -> None:
    pairless = tmp_path / "pairless.npz"
    with np.load(table) as file:
        np.savez(pairless, **{name: file[name] for name in file if name[-1] not in "12"})
    for path, vocabulary, words in (
        (table, {"other": 0}, "vocabulary: .* a tokenizer other than"),
        (tmp_path / "none.npz", WORDS, "option: .* No such file"),
        (tmp_path, WORDS, "option: .* directory"),
        (Path(__file__), WORDS, "option: .* is not a table"),
        (pairless, WORDS, "option: .* its pairs are damaged"),
    ):
        with pytest.raises(OutriderError, match=words):
            Tables.load(path, vocabulary, len(WORDS))
