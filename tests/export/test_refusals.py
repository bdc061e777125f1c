"""What cannot be exported is refused by name, with the reason, and leaves nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    CONTEXT,
    Workshop,
)
from commands import error_line
from exported import (
    TIED,
    UNTIED,
    command,
    nothing_left,
)
from safetensors.torch import load_file, save_file

from export import decoder, part
from export.pair import DEFAULT_MAX_LEN
from runtime.files.errors import EXIT_STATUS, OutriderError


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon", "attention does not go through Transformers' attention interface"),
        ("bloom", "attention does not go through Transformers' attention interface"),
        ("gptj", "attention does not go through Transformers' attention interface"),
        ("mamba", "not all of its layers keep a KV cache"),
        ("t5", "it is an encoder-decoder model"),
    ],
)
def test_architectures_that_the_graph_cannot_express(
    workshop: Workshop, tmp_path: Path, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = workshop.checkpoint(name)
    status, err = command(capsys, tmp_path, source, "--max-len", "64")
    assert status == EXIT_STATUS["architecture"]
    cause = error_line(err, "architecture")
    assert reason in cause
    assert ARCHITECTURES[name]().__class__.__name__.removesuffix("Config").lower() in cause.lower()
    assert nothing_left(tmp_path)


def test_attention_that_the_graph_cannot_express() -> None:
    """Architectures not written yet: a bias, a mask of their own."""
    rows = torch.zeros(1, 2, 3, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(decoder.UnsupportedArchitecture, match="its attention takes alibi"):
        decoder._attention(torch.nn.Identity(), rows, rows, rows, mask, alibi=torch.zeros(2))
    with pytest.raises(decoder.UnsupportedArchitecture, match="outside the mask interface"):
        decoder._attention(torch.nn.Identity(), rows, rows, rows, None)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_rope_that_changes_with_the_length(
    workshop: Workshop, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the original context they are exact: see the random walk, and test_transformers."""
    source = workshop.checkpoint(name)
    status, err = command(capsys, tmp_path, source, "--max-len", str(CONTEXT // 2 + 1))
    assert status == EXIT_STATUS["architecture"]
    assert f"Build with MAX_LEN={CONTEXT // 2}." in err
    assert "position embeddings" in error_line(err, "architecture")
    assert nothing_left(tmp_path)


def test_max_len(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def make(role: str, found: object, dtype: str, max_len: int, *_: object, **__: object) -> None:
        asked.append(max_len)
        raise OutriderError("disk", "far enough", "Stop.")

    monkeypatch.setattr(part, "make", make)
    small = workshop.checkpoint(TIED)
    large = workshop.checkpoint(TIED, max_position_embeddings=4096)
    for source, options in ((small, []), (large, []), (small, ["--max-len", "99"])):
        command(capsys, tmp_path, source, *options)
    assert asked == [CONTEXT, DEFAULT_MAX_LEN, 99]
    for wrong in (CONTEXT + 1, 31):
        status, err = command(capsys, tmp_path, small, "--max-len", str(wrong))
        assert status == EXIT_STATUS["option"]
        assert f"MAX_LEN={wrong}" in error_line(err, "option")
    assert len(asked) == 3


def _drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _misshape_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a tensor is missing": (_drop_a_tensor, "checkpoint", "lacks 1 of its weights"),
    "a tensor of another shape": (_misshape_a_tensor, "checkpoint", "weights"),
    "truncated weights": (_truncate, "checkpoint", "cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "checkpoint", "has no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "checkpoint", "has no config.json"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{'model_type': "),
        "checkpoint",
        "config.json",
    ),
    "config of an unknown model": (
        lambda f: (f / "config.json").write_text('{"model_type": "steam-engine"}'),
        "architecture",
        "steam-engine",
    ),
    "no tokenizer": (_no_tokenizer, "checkpoint", "tokenizer"),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "checkpoint",
        "tokenizer",
    ),
    "broken generation_config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "checkpoint",
        "generation_config.json",
    ),
    "no folder": (shutil.rmtree, "checkpoint", "is not a folder"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_checkpoints(
    workshop: Workshop, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, kind, cause = DAMAGE[what]
    copy = Path(shutil.copytree(workshop.checkpoint(UNTIED), tmp_path / "checkpoint"))
    damage(copy)
    status, err = command(capsys, tmp_path, copy, "--max-len", "64")
    assert status == EXIT_STATUS[kind], err
    assert cause in error_line(err, kind)
    assert nothing_left(tmp_path)


def test_a_foreign_folder_is_refused_before_the_work(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.md").write_text("years of work")
    status, err = command(capsys, tmp_path, workshop.checkpoint(TIED))
    assert status == EXIT_STATUS["disk"]
    assert "cannot be replaced" in error_line(err, "disk")
    assert err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_a_name_on_the_hub_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = command(capsys, tmp_path, "nobody/nothing")
    assert status == EXIT_STATUS["checkpoint"]
    assert "nobody/nothing" in error_line(err, "checkpoint")
    assert nothing_left(tmp_path)
