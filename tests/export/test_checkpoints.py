"""What only looks like a checkpoint, or holds more than its graph would: named, not ignored.

And nothing that a checkpoint brings along is run, whatever stdin says.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, Workshop
from commands import error_line
from exported import command, nothing_left
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from export import part
from export.checkpoint import find
from export.vocabulary import check_chat_template, load_tokenizer
from runtime.files.errors import EXIT_STATUS, OutriderError

Damage = Callable[[Path], object]


@pytest.fixture
def copy(workshop: Workshop, tmp_path: Path) -> Path:
    """An untied model: what it lacks cannot be taken from elsewhere."""
    return Path(shutil.copytree(workshop.checkpoint("qwen2"), tmp_path / "checkpoint"))


def _json(name: str, **fields: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **fields}))

    return damage


def _tensors(**shapes: list[int]) -> Damage:
    """More weights."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights |= {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return damage


def _instead(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def _all(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000\n"
REFUSED: dict[str, tuple[Damage, str, str]] = {
    "an extra layer": (
        _tensors(model__layers__2__mlp__up_proj__weight=[96, 64]),
        "checkpoint",
        "1 weights that a Qwen2ForCausalLM does not take, model.layers.2.mlp.up_proj.weight first",
    ),
    "biases": (_tensors(model__layers__0__mlp__up_proj__bias=[96]), "checkpoint", "up_proj.bias"),
    "an adapter's tensors": (
        _tensors(model__layers__0__mlp__up_proj__lora_A__weight=[8, 64]),
        "checkpoint",
        "Merge the adapter first",
    ),
    "a classifier's head": (_tensors(score__weight=[2, 64]), "checkpoint", "score.weight first"),
    "an adapter beside": (
        _json("adapter_config.json", peft_type="LORA"),
        "checkpoint",
        "a PEFT adapter beside its weights",
    ),
    "an adapter alone": (
        _all(
            _without_weights,
            _json("adapter_config.json", peft_type="LORA"),
            _instead("adapter_model.safetensors", b""),
        ),
        "checkpoint",
        "is a PEFT adapter, which is no model by itself. Merge the adapter first",
    ),
    "an unknown quantisation": (
        _json("config.json", quantization_config={"quant_method": "odd", "bits": 3}),
        "checkpoint",
        "is quantised (quantization_config: odd)",
    ),
    "quantised, not said how": (
        _json("config.json", quantization_config=4), "checkpoint", "is quantised",
    ),
    "GGUF": (
        _all(_without_weights, _instead("model.Q4_K_M.gguf", b"GGUF")),
        "checkpoint",
        "llama.cpp's format, GGUF",
    ),
    "a pointer for weights": (
        _instead("model.safetensors", POINTER), "checkpoint", "model.safetensors is a git-LFS",
    ),
    "a pointer for the tokenizer": (
        _instead("tokenizer.json", POINTER), "checkpoint", "tokenizer.json is a git-LFS pointer",
    ),
    "an end beyond the vocabulary": (
        _json("generation_config.json", eos_token_id=[0, VOCAB_SIZE]),
        "checkpoint",
        f"eos_token_id {VOCAB_SIZE}, and {VOCAB_SIZE} tokens",
    ),
    "a negative end": (
        _json("generation_config.json", eos_token_id=-1), "checkpoint", "eos_token_id -1",
    ),
    "an architecture that is a number": (
        _json("config.json", architectures=-1), "checkpoint", "architectures = -1",
    ),
    "a size that is a word": (
        _json("config.json", num_hidden_layers="two"),
        "architecture",
        "'num_hidden_layers': TypeError: Field 'num_hidden_layers' expected int, got str "
        "(value: 'two')",
    ),
    "no context": (
        _json("config.json", max_position_embeddings=0),
        "checkpoint",
        "max_position_embeddings = 0",
    ),
    "config.json without end": (
        _instead("config.json", b"[" * 100_000), "checkpoint", "config.json cannot be read",
    ),
    "a list for a configuration": (
        _instead("config.json", b"[1]"), "checkpoint", "config.json is no JSON object",
    ),
    "a template that cannot be parsed": (
        _instead("chat_template.jinja", b"{% for m in messages %}{{ m.content }}"),
        "checkpoint",
        "the chat template",
    ),
    "a template that renders nothing": (
        _instead("chat_template.jinja", b"{{ messages[0].content.nothing.further }}"),
        "checkpoint",
        "cannot render a message: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_ignored_is_refused(
    copy: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, kind, words = REFUSED[what]
    damage(copy)
    status, err = command(capsys, tmp_path, copy, "--max-len", "64")
    assert status == EXIT_STATUS[kind], err
    error_line(err, kind)
    assert words in err.splitlines()[-1]
    assert nothing_left(tmp_path)


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    status, err = command(capsys, tmp_path, tmp_path / "model.gguf")
    assert status == EXIT_STATUS["checkpoint"]
    assert "GGUF" in error_line(err, "checkpoint")


def test_a_model_without_an_end_is_said(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its texts end by length alone, which may be meant."""

    def enough(*_: object, **__: object) -> None:
        raise OutriderError("disk", "far enough", "Stop.")

    monkeypatch.setattr(part, "make", enough)
    said = "names no eos_token_id"
    assert said not in command(capsys, tmp_path, copy)[1]  # the control: 0 is an end
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((copy / name).read_text())
        content.pop("eos_token_id", None)
        content.pop("eos_token", None)
        (copy / name).write_text(json.dumps(content))
    status, err = command(capsys, tmp_path, copy)
    assert said in err and status == EXIT_STATUS["disk"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for c in messages[0].content %}{{ c.text | trim }}{% endfor %}",
        "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}",
    ],
)
def test_templates_that_are_fine(copy: Path, template: str) -> None:
    """Of texts, of parts, and with what only chat templates have."""
    (copy / "chat_template.jinja").write_text(template)
    found = find(str(copy))
    check_chat_template(found, load_tokenizer(found))


# Code


CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import PretrainedConfig
class Odd(PretrainedConfig):
    model_type = "odd"
"""


@pytest.fixture
def ran(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the checkpoint's code makes; somebody would say yes to running it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    made = tmp_path / "ran"
    (copy / "odd.py").write_text(CODE.format(ran=str(made)))
    return made


@pytest.mark.parametrize(
    ("model_type", "of"), [("odd", "AutoConfig"), ("distilbert", "AutoModelForCausalLM")]
)
def test_a_checkpoints_code_is_never_run(
    copy: Path, ran: Path, tmp_path: Path, model_type: str, of: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    _json("config.json", model_type=model_type, auto_map={of: "odd.Odd"})(copy)
    status, err = command(capsys, tmp_path, copy, "--max-len", "64")
    assert not ran.exists()
    assert status == EXIT_STATUS["architecture"]
    assert "needs code of its own" in error_line(err, "architecture")


def test_a_tokenizers_code_is_never_run(copy: Path, ran: Path) -> None:
    """Its tokenizer.json says all."""
    code = {"AutoTokenizer": ["odd.Odd", "odd.Odd"]}
    _json("tokenizer_config.json", tokenizer_class="Odd", auto_map=code)(copy)
    with contextlib.suppress(OutriderError):
        assert len(load_tokenizer(find(str(copy)))) == VOCAB_SIZE
    assert not ran.exists()


def test_control_it_would_be_run(copy: Path, ran: Path) -> None:
    """By Transformers, where it is left to ask."""
    _json("config.json", model_type="odd", auto_map={"AutoConfig": "odd.Odd"})(copy)
    AutoConfig.from_pretrained(copy)
    assert ran.exists()


def test_code_that_is_not_needed_is_said_not_to_be_run(
    copy: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _json("config.json", auto_map={"AutoConfig": "odd.Odd"})(copy)
    assert find(str(copy)).context == 256
    assert (
        "brings code of its own, which is not run: Transformers' Qwen2" in capsys.readouterr().err
    )
    assert not ran.exists()


# The key of a part


def test_other_code_in_a_subfolder_makes_another_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "__file__", str(tmp_path / "part.py"))
    digests = [part.exporter_digest()]
    for name in ("part.py", "verify_node/node.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1")
        digests.append(part.exporter_digest())
    (tmp_path / "verify_node" / "node.py").write_text("a = 2")
    digests.append(part.exporter_digest())
    assert len(set(digests)) == 4
