"""Models that cannot be exported, or only in part, are refused by name and leave no files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from checkpoints import ARCHITECTURES, CONTEXT, RECURRENT, TOKENS, VOCAB_SIZE, write_any
from commands import error_line
from exported import TIED, UNTIED, Refused, edit_json, edit_weights, run_export
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from workshop import MAX_LEN, Workshop

from export import decoder, loading, pair, part
from export.checkpoint import content_hashes, find
from export.pair import DEFAULT_MAX_LEN
from export.vocabulary import check_chat_template, load_tokenizer, write_tokenizer
from export.weights.stored import load_as_stored
from runtime.files.errors import EXIT_STATUS, OutriderError

Damage = Callable[[Path], object]


@pytest.fixture
def copy(workshop: Workshop, tmp_path: Path) -> Path:
    """A copy of an untied model: no missing tensor can be taken from another one."""
    return Path(shutil.copytree(workshop.checkpoint(UNTIED), tmp_path / "checkpoint"))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop before a graph is made; record each requested MAX_LEN."""
    requested_lengths: list[int] = []

    def make(request: part.PartRequest, *_: object) -> None:
        requested_lengths.append(request.max_len)
        raise OutriderError("disk", "far enough", "Stop.")

    monkeypatch.setattr(part, "make", make)
    return requested_lengths


# Architectures

OUTSIDE = "attention does not go through Transformers' attention interface"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("roformer", OUTSIDE),
        ("falcon-rw", "its ALiBi differs between Transformers' implementations"),
        ("llama4", "its attention takes positions from the length of the cache"),
        ("mamba", "it keeps its state outside Transformers' cache"),
        ("bigbird-pegasus", "its encoder uses sparse attention for long sources"),
        ("longt5", "its encoder uses sparse attention for long sources"),
        ("jamba", "it carries a state that the graph cannot express"),
        ("xlnet", "Use a checkpoint of another architecture"),
        ("bert", "its tokens attend to later ones"),
        ("bart-alone", "it takes no position_ids"),
        ("speech-to-text", "its encoder does not read log-mel spectra"),
    ],
)
def test_architectures_that_the_graph_cannot_express(
    workshop: Workshop, refused: Refused, name: str, reason: str
) -> None:
    message = refused(workshop.checkpoint(name), kind="architecture")
    assert reason in message
    kind = type(ARCHITECTURES[name]()).__name__.removesuffix("Config").removesuffix("Text")
    assert kind.lower() in message.lower()


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("alibi = False", {"attn_config": {"alibi": False}}),
        ("alibi_bias_max = 16", {"attn_config": {"alibi_bias_max": 16}}),
        ("prefix_lm = True", {"attn_config": {"prefix_lm": True}}),
        ("logit_scale = 0.5", {"logit_scale": 0.5}),
    ],
)
def test_fields_that_transformers_ignores(
    workshop: Workshop, refused: Refused, field: str, overrides: dict[str, Any]
) -> None:
    """Fault: MPT was exported with other slopes than it was trained with, without a word."""
    odd = workshop.checkpoint("mpt", **overrides)
    assert f"Transformers ignores {field}" in refused(odd, kind="architecture")


def test_a_source_with_a_vocabulary_of_its_own(workshop: Workshop, refused: Refused) -> None:
    """Fault: the ids of a source were compared with the number of tokens of the output."""
    odd = workshop.checkpoint("marian", decoder_vocab_size=VOCAB_SIZE - 8)
    assert "vocabularies of different sizes" in refused(odd, kind="architecture")


@pytest.mark.parametrize(
    ("name", "option", "value", "kind", "cause"),
    [
        ("lfm2", "cache-type", "int8", "option", "supports only models without a recurrent state"),
        ("lfm2", "format", "torch", "option", "supports only models without a recurrent state"),
        ("lfm2", "backend-runs", "full", "backend", "the backend does not run models with a recu"),
        *(
            (name, "dtype", "float16", "option", "supports only models without a recurrent state")
            for name in RECURRENT
        ),
    ],
)
def test_what_a_recurrent_state_is_not_exported_with(
    workshop: Workshop, refused: Refused, name: str, option: str, value: str, kind: str, cause: str
) -> None:
    """Refused as soon as the model is loaded, before minutes of work. Fault: float16 was reported
    as a failure of the architecture, because the state decays in float32."""
    message = refused(workshop.checkpoint(name), f"--{option}", value, "--max-len", "64", kind=kind)
    assert cause in message
    assert "run the original" not in message


def test_a_recurrent_state_that_another_backend_was_given_before(
    workshop: Workshop, refused: Refused
) -> None:
    """Fault: a cached part was given to any backend."""
    target = workshop.example("lfm2")
    workshop.graphs(target, workshop.checkpoint("lfm2", blur=0.1), max_gamma=1)
    options = ["--max-len", f"{MAX_LEN}", "--max-gamma", "1", "--cache", f"{workshop.cache}"]
    message = refused(target, *options, "--backend-runs", "full", kind="backend")
    assert "the backend does not run models with a recurrent state" in message


def test_small_weights_do_not_hide_that_tokens_look_ahead(
    workshop: Workshop, tmp_path: Path, refused: Refused
) -> None:
    shutil.copytree(workshop.checkpoint("bert"), tmp_path / "small")

    def shrink(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if "attention.output.dense.weight" in name:
                weights[name] *= 0.002

    edit_weights(tmp_path / "small", shrink)
    message = refused(tmp_path / "small", kind="architecture")
    assert "its tokens attend to later ones" in message


def test_a_model_that_keeps_no_cache_writes_no_texts_to_quantise_by(
    tmp_path: Path, refused: Refused
) -> None:
    config = CONFIG_MAPPING["granitemoehybrid"]  # in this tiny one all layers are linear
    assert write_any(tmp_path / "hybrid", config, MODEL_FOR_CAUSAL_LM_MAPPING[config]) is None
    message = refused(tmp_path / "hybrid", "--weights", "int8", kind="architecture")
    assert "it does not generate with a KV cache" in message


def test_attention_that_the_graph_cannot_express() -> None:
    """Hypothetical architectures with an attention bias, or a mask of their own."""
    rows = torch.zeros(1, 2, 3, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(decoder.UnsupportedArchitecture, match="its attention takes alibi"):
        decoder._attention(torch.nn.Identity(), rows, rows, rows, mask, alibi=torch.zeros(2))
    with pytest.raises(decoder.UnsupportedArchitecture, match="outside the mask interface"):
        decoder._attention(torch.nn.Identity(), rows, rows, rows, None)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Could not guard on data-dependent expression u0", "are known only at run time"),
        ("False != True", "torch.export cannot follow its code (False != True)"),
    ],
)
def test_what_torch_says_of_code_is_a_reason(message: str, reason: str) -> None:
    outer = RuntimeError("Failed to export the model")
    outer.__cause__ = AssertionError(message)
    assert reason in part._innermost_reason(outer)


def test_rope_that_changes_with_the_length(workshop: Workshop, refused: Refused) -> None:
    """Within the original context it is exact: see test_graph.py and test_transformers.py. Fault:
    dynamic NTK embeddings, which Transformers changes only beyond the checkpoint's own context,
    were refused beyond an original one."""
    long = "--max-len", str(CONTEXT // 2 + 1)
    message = refused(workshop.checkpoint("phi3-longrope"), *long, kind="architecture")
    assert "position embeddings" in message and f"Build with MAX_LEN={CONTEXT // 2}." in message
    loading.check_length(find(str(workshop.checkpoint("llama-dynamic"))), CONTEXT)


def test_max_len(workshop: Workshop, stopped: list[int], refused: Refused) -> None:
    small = workshop.checkpoint(TIED)
    large = workshop.checkpoint(TIED, max_position_embeddings=4096)
    for source, options in ((small, []), (large, []), (small, ["--max-len", "99"])):
        refused(source, *options, kind="disk")
    for wrong in (CONTEXT + 1, 31):
        assert f"MAX_LEN={wrong}" in refused(small, "--max-len", str(wrong), kind="option")
    assert stopped == [CONTEXT, DEFAULT_MAX_LEN, 99]


# Folders that are not a valid checkpoint, or contain more than the graph would


def _json(name: str, **fields: Any) -> Damage:
    return lambda folder: edit_json(folder / name, **fields)


def _tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return lambda folder: edit_weights(folder, edit)


def _more(name: str, *shape: int) -> Damage:
    return _tensors(lambda weights: weights.update({name: torch.zeros(shape)}))


def _instead(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def _without(pattern: str) -> Damage:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def _all(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def _to_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def _truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
SCALES = "model.layers.1.self_attn.k_proj.scales"
UP_PROJ = "model.layers.0.mlp.up_proj"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000\n"
_config = partial(_json, "config.json")
PEFT = _json("adapter_config.json", peft_type="LORA")
REFUSED: dict[str, tuple[Damage, str]] = {
    # Lost or broken
    "a tensor is missing": (
        _tensors(lambda w: w.pop(K_PROJ)),
        f"checkpoint lacks 1 weights of a Qwen2ForCausalLM ({K_PROJ} first). Download",
    ),
    "a tensor of another shape": (
        _tensors(lambda w: w.update({K_PROJ: w[K_PROJ][:-1].contiguous()})),
        f"differ from its config.json, {K_PROJ} first: [31, 64], not [32, 64]",
    ),
    "truncated weights": (_truncate, "cannot be read"),
    "a page for weights": (
        _all(_without("model.safetensors"), _instead("pytorch_model.bin", b"<!DOCTYPE html>")),
        "cannot be read: a .bin file contains more than tensors, or is damaged",
    ),
    "a broken index": (
        _all(_to_a_shard, _instead("model.safetensors.index.json", b"{")), "cannot be read: Exp",
    ),
    "no weights": (_without("model.safetensors"), "has no weights"),
    "no config": (_without("config.json"), "has no config.json"),
    "config is no JSON": (_instead("config.json", b"{'model_type': "), "config.json"),
    "config without end": (_instead("config.json", b"[" * 100_000), "config.json cannot be read"),
    "config is a list": (_instead("config.json", b"[1]"), "config.json is not a JSON object"),
    "an unknown model": (_config(model_type="steam-engine"), "steam-engine"),
    "a classifier": (
        _all(
            _config(architectures=["Qwen2ForSequenceClassification"]),
            _tensors(lambda w: w.update({"score.weight": w.pop("lm_head.weight")})),
        ),
        "is a Qwen2ForSequenceClassification, which cannot be exported: it lacks 1 weights of a "
        "Qwen2ForCausalLM (lm_head.weight first) and has 1 weights that are not part of a "
        "Qwen2ForCausalLM (score.weight first)",
    ),
    "an encoder": (_config(model_type="distilbert"), "Transformers has no decoder of this kind"),
    "images only": (_instead("config.json", b'{"model_type": "vit"}'), "it has no vocabulary"),
    "no tokenizer": (_without("tokenizer*"), "tokenizer"),
    "broken tokenizer": (_instead("tokenizer.json", b"{"), "tokenizer"),
    "broken generation": (_instead("generation_config.json", b"{"), "generation_config.json"),
    "generation in config": (
        _all(_without("generation_config.json"), _config(early_stopping="perhaps")),
        "config.json cannot be read",
    ),
    "no folder": (shutil.rmtree, "is not a folder"),
    "a pointer for weights": (_instead("model.safetensors", POINTER), "safetensors is a git-LFS"),
    "a pointer for words": (_instead("tokenizer.json", POINTER), "tokenizer.json is a git-LFS"),
    # Would be ignored
    "an extra layer": (
        _more("model.layers.2.mlp.up_proj.weight", 96, 64),
        "has 1 weights that are not part of a Qwen2ForCausalLM "
        "(model.layers.2.mlp.up_proj.weight first)",
    ),
    "a layer before those for further tokens": (
        _all(_config(num_nextn_predict_layers=1), _more("model.layers.1.enorm.weight", 64)),
        "(model.layers.1.enorm.weight first)",
    ),
    "a layer that only claims to be for further tokens": (
        _all(
            _config(num_nextn_predict_layers=1),
            _more("model.layers.2.mlp.up_proj.weight", 96, 64),
        ),
        "(model.layers.2.mlp.up_proj.weight first)",
    ),
    "weights under another name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.fp16.safetensors"),
        "has model.fp16.safetensors, but no model.safetensors and no index",
    ),
    "an unknown rotation": (
        _config(rope_parameters={"rope_type": "su", "rope_theta": 1e4}),
        "config.json has a rope_type that Transformers lacks: 'su'",
    ),
    "no output matrix": (
        _tensors(lambda w: w.pop("lm_head.weight")), "set tie_word_embeddings to true",
    ),
    "biases": (_more(f"{UP_PROJ}.bias", 96), "up_proj.bias"),
    "an adapter's tensors": (_more(f"{UP_PROJ}.lora_A.weight", 8, 64), "Merge the adapter first"),
    "a classifier's head": (_more("score.weight", 2, 64), "(score.weight first)"),
    "an adapter beside": (PEFT, "a PEFT adapter beside its weights"),
    "an adapter alone": (
        _all(
            _without("model.safetensors"), PEFT, _instead("adapter_model.safetensors", b""),
        ),
        "is a PEFT adapter, not a complete model. Merge the adapter first",
    ),
    "an unknown quantisation": (
        _config(quantization_config={"quant_method": "odd", "bits": 3}),
        "unsupported format: quantization_config: odd",
    ),
    "quantised, in the old way": (
        _config(quantization_config={"load_in_8bit": True}), "quantization_config: bitsandbytes",
    ),
    "quantised, not said how": (_config(quantization_config=4), "is quantised"),
    "quantised by MLX": (
        _config(quantization_config={"group_size": 64, "bits": 4}),
        "unsupported format: quantization_config without quant_method. Use the checkpoint that",
    ),
    "quantised, not said": (
        _tensors(lambda w: w.update({K_PROJ: w[K_PROJ][:, :8].clone(), SCALES: torch.ones(32, 1)})),
        f"unsupported format: its config.json does not describe {SCALES}. Use the checkpoint that",
    ),
    "names that a wrapper changed": (
        _tensors(lambda w: [w.update({f"module.{name}": w.pop(name)}) for name in [*w]]),
        "(module.lm_head.weight first). Save them again without module. at the beginning of",
    ),
    "GGUF": (
        _all(_without("model.safetensors"), _instead("model.Q4_K_M.gguf", b"GGUF")),
        "cannot be read as GGUF",
    ),
    # Nonsense
    "an end beyond the vocabulary": (
        _json("generation_config.json", eos_token_id=[0, VOCAB_SIZE]),
        f"eos_token_id {VOCAB_SIZE}, none of its {VOCAB_SIZE} tokens",
    ),
    "a negative end": (_json("generation_config.json", eos_token_id=-1), "eos_token_id -1"),
    "architectures, a number": (_config(architectures=-1), "architectures = -1"),
    "a size that is a word": (
        _config(num_hidden_layers="two"),
        "'num_hidden_layers': TypeError: Field 'num_hidden_layers' expected int, got str "
        "(value: 'two')",
    ),
    "no context": (_config(max_position_embeddings=0), "max_position_embeddings = 0"),
    "a template that cannot be parsed": (
        _instead("chat_template.jinja", b"{% for m in messages %}{{ m.content }}"),
        "the chat template",
    ),
    "a template that renders nothing": (
        _instead("chat_template.jinja", b"{{ messages[0].content.nothing.further }}"),
        "cannot render a message: ",
    ),
    "a processor's template that is none": (
        _instead("chat_template.json", b'{"chat_template": 7}'),
        "chat_template.json cannot be read: its chat_template is 7",
    ),
}  # fmt: skip
OF_THE_ARCHITECTURE = {
    "an unknown model", "a size that is a word", "a classifier", "an encoder", "images only",
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_checkpoints_that_are_refused(copy: Path, refused: Refused, what: str) -> None:
    damage, words = REFUSED[what]
    damage(copy)
    kind = "architecture" if what in OF_THE_ARCHITECTURE else "checkpoint"
    assert words in refused(copy, kind=kind)


def test_weights_that_the_config_names(copy: Path) -> None:
    """Fault: refused, as no file had the usual name."""
    (copy / "model.safetensors").rename(copy / "own.safetensors")
    _config(transformers_weights="own.safetensors")(copy)
    loading.load(find(str(copy)), torch.float32)


def test_weights_that_lie_beside_those_that_are_read(copy: Path) -> None:
    """Old repositories have the same weights twice. Faults: those that are read were rounded to the
    16 bits of the others; a pointer in place of the others was refused."""
    weights = load_file(copy / "model.safetensors")
    half = {name: tensor.half() for name, tensor in weights.items()}
    torch.save(half, copy / "pytorch_model.bin")
    model = load_as_stored(find(str(copy)))
    assert torch.equal(model.get_parameter(K_PROJ), weights[K_PROJ])
    before = content_hashes(find(str(copy)))
    (copy / "pytorch_model.bin").write_bytes(POINTER)
    assert content_hashes(find(str(copy))) == before
    (copy / "model.safetensors").unlink()  # control: now the others are read
    torch.save(half, copy / "pytorch_model.bin")
    narrow = load_as_stored(find(str(copy))).get_parameter(K_PROJ)
    assert torch.equal(narrow[:], half[K_PROJ].float())
    assert content_hashes(find(str(copy))) != before


def test_layers_that_predict_further_tokens_are_left_out(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: they were taken for weights of another model, but for the numbers of layers that
    Transformers knows. As in GigaChat 3; DeepSeek V3 has one after layer 60."""
    _all(_config(num_nextn_predict_layers=1), _more("model.layers.2.enorm.weight", 64))(copy)
    loading.load(find(str(copy)), torch.float32)
    assert "layers that predict further tokens are left out: 1" in capsys.readouterr().err


def test_a_marian_with_sentencepiece_files(
    workshop: Workshop, tmp_path: Path, refused: Refused
) -> None:
    """As on the hub: Transformers' MarianTokenizer reads only those files, and needs SentencePiece.
    A tokenizer.json beside them is enough."""
    marian = Path(shutil.copytree(workshop.checkpoint("marian"), tmp_path / "marian"))
    _json("tokenizer_config.json", tokenizer_class="MarianTokenizer")(marian)
    (marian / "source.spm").write_bytes(b"")
    assert load_tokenizer(find(str(marian)))("ab").input_ids == [65, 66]
    (marian / "tokenizer.json").rename(marian / "vocab.json")
    assert "marian has no fast tokenizer, and Sent" in refused(marian)


def test_tokenizers_that_are_not_read(workshop: Workshop, tmp_path: Path, refused: Refused) -> None:
    """Fault: the remedy was to copy a file that was there."""
    copy = Path(shutil.copytree(workshop.checkpoint(TIED), tmp_path / "checkpoint"))
    config = copy / "tokenizer_config.json"
    config.write_text("{")
    assert "Download its tokenizer*.json and special_tokens_map.json again." in refused(copy)
    config.write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}'
    )
    assert "never run. Remove auto_map from its tokenizer_config.json." in refused(copy)
    config.write_text('{"tokenizer_class": "Own"}')
    assert len(load_tokenizer(find(str(copy)))) == VOCAB_SIZE  # the remedy works
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.model").write_bytes(b"not one")
    assert "Copy the checkpoint's tokenizer.json beside its weights." in refused(copy)


def test_a_sentencepiece_file_alone(workshop: Workshop, tmp_path: Path) -> None:
    """Fault: the remedy was to install tiktoken, which does not read such files."""
    llama = Path(shutil.copytree(workshop.checkpoint("llama"), tmp_path / "llama"))
    (llama / "tokenizer.json").unlink()
    (llama / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    SentencePieceTrainer.train(
        input=__file__, model_prefix=str(llama / "tokenizer"), vocab_size=500, model_type="bpe",
        byte_fallback=True, remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    text = "def read(path: Path) -> str:  # reads a file \N{GRINNING FACE}"
    expected = SentencePieceProcessor(model_file=str(llama / "tokenizer.model")).encode(text)
    assert load_tokenizer(find(str(llama)))(text, add_special_tokens=False).input_ids == expected


def test_names_of_nothing(copy: Path, refused: Refused) -> None:
    assert "the name of a model is empty" in refused("")
    assert "config.json is a file but not GGUF" in refused(copy / "config.json")
    assert "~nobody/model is not a folder" in refused("~nobody/model")
    (copy / "circle").symlink_to("circle")
    assert "circle is not a folder" in refused(copy / "circle")


def test_a_model_that_memory_does_not_hold(copy: Path) -> None:
    """Fault: the error told the user to download the model again."""
    edit_json(copy / "config.json", vocab_size=10**12)
    with pytest.raises(MemoryError):
        loading.load(find(str(copy)), torch.float32)


def test_a_name_on_the_hub_without_a_network(refused: Refused) -> None:
    assert "nobody/nothing" in refused("nobody/nothing")


def test_a_foreign_folder_is_refused_before_the_work(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.md").write_text("years of work")
    status, err = run_export(capsys, tmp_path, workshop.checkpoint(TIED))
    assert status == EXIT_STATUS["disk"]
    assert "cannot be replaced" in error_line(err, "disk")
    assert err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_a_model_without_an_end_is_said(
    copy: Path, tmp_path: Path, stopped: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its texts end only at the length limit, which may be intended, so it is just a note."""
    message = "names no eos_token_id"
    assert message not in run_export(capsys, tmp_path, copy)[1]  # control: token 0 ends a text
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        _json(name, eos_token_id=None, eos_token=None)(copy)
    assert message in run_export(capsys, tmp_path, copy)[1]


def test_what_of_the_tokenizer_is_not_kept_is_said(
    copy: Path, tmp_path: Path, stopped: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    named = [{"name": "chat", "template": "a"}, {"name": "tools", "template": "b"}]
    _json("tokenizer_config.json", chat_template=named, clean_up_tokenization_spaces=True)(copy)
    err = run_export(capsys, tmp_path, copy)[1]
    assert "none of its chat templates (chat, tools) is called default" in err
    assert "spaces before punctuation" not in err, "Transformers does not, for this kind"
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0)]))
    other = PreTrainedTokenizerFast(tokenizer_object=unigram, clean_up_tokenization_spaces=True)
    pair._note_ignored_settings(find(str(copy)), other)
    assert "spaces before punctuation" in capsys.readouterr().err


def test_settings_that_are_not_kept_are_said(
    copy: Path, tmp_path: Path, stopped: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that a request can set apart from those that nothing can."""
    _json("generation_config.json", top_p=0.5, typical_p=0.5, stop_strings=["x"])(copy)
    err = run_export(capsys, tmp_path, copy)[1]
    assert "sets top_p=0.5, stop_strings=['x'], which the bundle does not keep: pass the" in err
    assert "sets typical_p=0.5, which the bundle does not keep: no option has one of these" in err


def test_tokens_without_an_embedding_are_said(
    workshop: Workshop, tmp_path: Path, stopped: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are no fault: only prompts that contain them are refused."""
    message = "note: 2 tokens of the tokenizer have no embedding: prompts with them are refused"
    for extra in ((), ("<extra 0>", "<extra 1>")):
        checkpoint = workshop.checkpoint("llama", tokens=(*TOKENS, *extra))
        assert (message in run_export(capsys, tmp_path, checkpoint)[1]) == bool(extra)


CONTENT_PARTS = "{% for c in messages[0].content %}{{ c.text | trim }}{% endfor %}"


@pytest.mark.parametrize(
    ("ending", "template"),
    [
        ("jinja", "{% for m in messages %}{{ m.content }}{% endfor %}"),
        ("jinja", "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}"),
        ("jinja", CONTENT_PARTS),
        ("json", CONTENT_PARTS),
    ],
)
def test_templates_that_are_fine(copy: Path, ending: str, template: str) -> None:
    """Content as text and as parts, extensions of chat templates, and a processor's template."""
    content = json.dumps({"chat_template": template}) if ending == "json" else template
    (copy / f"chat_template.{ending}").write_text(content)
    found = find(str(copy))
    check_chat_template(found, load_tokenizer(found))
    assert write_tokenizer(found, load_tokenizer(found), copy).chat_template


# Code that comes with a checkpoint is never run, even if stdin would confirm it

CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import PretrainedConfig
class Odd(PretrainedConfig):
    model_type = "odd"
"""


@pytest.fixture
def code_ran_marker(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the checkpoint's code would create. Any prompt for permission gets a yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    created = tmp_path / "ran"
    (copy / "odd.py").write_text(CODE.format(ran=str(created)))
    return created


@pytest.mark.parametrize(
    ("model_type", "auto_class"), [("odd", "AutoConfig"), ("distilbert", "AutoModelForCausalLM")]
)
def test_a_checkpoints_code_is_never_run(
    copy: Path, code_ran_marker: Path, refused: Refused, model_type: str, auto_class: str
) -> None:
    """Control: Transformers itself, which asks for permission, would run it."""
    _config(model_type=model_type, auto_map={auto_class: "odd.Odd"})(copy)
    assert "requires its own code" in refused(copy, kind="architecture")
    assert not code_ran_marker.exists()
    if auto_class == "AutoConfig":
        AutoConfig.from_pretrained(copy)
        assert code_ran_marker.exists()


def test_a_tokenizers_code_is_never_run(copy: Path, code_ran_marker: Path) -> None:
    """Its tokenizer.json is sufficient."""
    code = {"AutoTokenizer": ["odd.Odd", "odd.Odd"]}
    _json("tokenizer_config.json", tokenizer_class="Odd", auto_map=code)(copy)
    with contextlib.suppress(OutriderError):
        assert len(load_tokenizer(find(str(copy)))) == VOCAB_SIZE
    assert not code_ran_marker.exists()


def test_code_that_is_not_needed_is_said_not_to_be_run(
    copy: Path, code_ran_marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _config(auto_map={"AutoConfig": "odd.Odd"})(copy)
    assert find(str(copy)).context == CONTEXT
    message = "comes with its own code, which is not run: Transformers' Qwen2"
    assert message in capsys.readouterr().err
    assert not code_ran_marker.exists()
