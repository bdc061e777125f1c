"""Encoder-decoders: which are exported, which are refused, and when a draft shares the encoder."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE
from exported import Refused, edit_json
from safetensors.torch import load_file, save_file
from workshop import Workshop

from engines.aotinductor import builder
from engines.bundle import build, supported_features
from engines.registry import BACKENDS
from export.checkpoint import find, has_same_encoder
from export.encoder import _number_positions
from runtime.files.errors import OutriderError
from runtime.files.manifest import ENCODER_DECODERS


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"num_decoder_layers": 1}, True),
        ({"num_heads": 8}, False),
        ({"d_ff": 90}, False),
        ({"pad_token_id": 5}, False),  # some models number positions from it
    ],
)
def test_what_a_configuration_says_of_an_encoder(
    workshop: Workshop, tmp_path: Path, change: dict[str, int], same: bool
) -> None:
    """The same weights compute something else with another configuration."""
    target = workshop.checkpoint("t5")
    other = Path(shutil.copytree(target, tmp_path / "other"))
    edit_json(other / "config.json", **change)
    assert has_same_encoder(find(str(target)), find(str(other))) is same


def test_an_embedding_by_another_name_is_none_to_compare(
    workshop: Workshop, tmp_path: Path
) -> None:
    """A file may store tied matrices only under the output matrix's name."""
    target, names = workshop.checkpoint("t5"), ("shared.weight", "lm_head.weight")
    folders = [Path(shutil.copytree(target, tmp_path / name)) for name in names]
    assert has_same_encoder(*(find(str(folder)) for folder in folders))
    for name, folder in zip(names, folders, strict=True):
        weights = load_file(target / "model.safetensors")
        weights[name] = weights.pop("shared.weight")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tied = find(str(folders[1]))
    assert not has_same_encoder(tied, tied)


@pytest.mark.slow
def test_positions_do_not_depend_on_how_a_text_is_cut() -> None:
    """Fault: M2M100 numbers the positions of each call, leaving out its padding tokens."""

    def positions(*widths: int) -> list[int]:
        parts = torch.tensor([[5, 0, 6, 7]]).split(widths, dim=1)
        begins = torch.tensor([sum(widths[:i]) for i in range(len(widths))])
        found = [
            _number_positions(None, None, x, 0, b[None, None])
            for x, b in zip(parts, begins, strict=True)
        ]
        return torch.cat(found, dim=1)[0].tolist()

    assert positions(4) == positions(1, 1, 1, 1) == positions(2, 2) == [1, 0, 3, 4]


@pytest.mark.parametrize(
    ("options", "kind", "cause"),
    [
        (["--dtype", "float16"], "option", "DTYPE=float16 supports only decoder-only models"),
        (
            ["--backend-runs", "full"],
            "backend",
            "the backend does not run encoder-decoders with DTYPE=",
        ),
        (["--cache-type", "int8"], "option", "CACHE=int8 supports only decoder-only models"),
        (["--draft", "llama"], "architecture", "only one of them is an encoder-decoder"),
    ],
)
def test_not_exported(
    workshop: Workshop, refused: Refused, options: list[str], kind: str, cause: str
) -> None:
    named = [str(workshop.checkpoint(x)) if x == "llama" else x for x in options]
    assert cause in refused(workshop.checkpoint("t5"), *named, kind=kind)


def test_backends_that_run_no_encoder(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = workshop.graphs(workshop.checkpoint("t5"), workshop.checkpoint("t5", blur=0.1))
    for name, dtype in product(BACKENDS, ("float32", "float16", "bfloat16")):
        dtypes = {"aotinductor": ["float32", "bfloat16"], "onnxruntime": ["float32"]}
        supported = dtype in dtypes.get(name, [])
        sm = "cpu" if name == "aotinductor" else ""
        # The export gets this list from `make engines`.
        assert (ENCODER_DECODERS in supported_features(name, dtype, sm)) == supported
    monkeypatch.setattr(builder, "targets", lambda *_: ["sm90"])
    for name in ("tensorrt_rtx", "aotinductor"):
        with pytest.raises(OutriderError, match=r"^backend: .*does not run encoder-decoders"):
            build(graphs, tmp_path / "out", backend=name, slots=1)


@pytest.mark.parametrize(
    ("generation", "cause"),
    [
        (
            {"suppress_tokens": [VOCAB_SIZE]},
            "generation_config names token 257, but the model has 257",
        ),
        ({"lang_to_id": {"<|en|>": "x"}}, "generation_config.lang_to_id.<|en|> is 'x', not"),
        ({"max_length": "x"}, "generation_config.max_length is 'x', not an integer"),
        ({"suppress_tokens": "ab"}, "generation_config.suppress_tokens is 'ab', not a list"),
        ({"forced_decoder_ids": [[1, -7]]}, "generation_config names token -7, but the model has"),
        (
            {"max_initial_timestamp_index": -1},
            "generation_config.max_initial_timestamp_index is -1, not from 0 to 65536",
        ),
        ({"language": "klingon"}, "Unsupported language: klingon"),
    ],
)
def test_checkpoints_that_cannot_transcribe(
    workshop: Workshop, refused: Refused, generation: dict[str, Any], cause: str
) -> None:
    odd = workshop.checkpoint("whisper", generation=generation)
    assert f"{odd.name} cannot transcribe: {cause}" in refused(odd)


def with_features(checkpoint: Path, folder: Path, **changed: int) -> Path:
    """Return a copy of the checkpoint with another feature extractor configuration."""
    other = Path(shutil.copytree(checkpoint, folder))
    edit_json(other / "preprocessor_config.json", **changed)
    return other


def test_features_of_no_length(workshop: Workshop, tmp_path: Path, refused: Refused) -> None:
    odd = with_features(workshop.checkpoint("whisper"), tmp_path / "odd", chunk_length=0)
    cause = "preprocessor_config.n_samples is 0, not from 1 to 2147483647"
    assert f"{odd}: {cause}" in refused(odd)


def test_a_draft_that_reads_other_features(
    workshop: Workshop, tmp_path: Path, refused: Refused
) -> None:
    target = workshop.checkpoint("whisper")
    other = with_features(target, tmp_path / "other", feature_size=16)
    message = refused(target, "--draft", str(other), kind="architecture")
    assert "reads 8 x 16 log-mel features, but its draft other reads 16 x 16" in message


def test_a_text_is_nothing_to_measure_it_on(
    workshop: Workshop, tmp_path: Path, refused: Refused
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("This is what was said. " * 40)
    options = ("--weights", "int8", "--text", str(text))
    assert "reads audio" in refused(workshop.checkpoint("whisper"), *options, kind="option")
