"""Load a checkpoint's model for tracing, with all its weights and no others."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from json import JSONDecodeError
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
    PreTrainedModel,
)

from runtime.files.errors import OutriderError, first_line, is_out_of_memory
from runtime.files.progress import note

from .checkpoint import Checkpoint
from .decoder import RecordingCache, traced_layers
from .encoder import TextAndSourceCache, example_source, source_arguments
from .formats.packed import Lazy, unsupported
from .functions import older_layers
from .functions.own import IMPLEMENTATION
from .functions.replaced import patched_layers
from .functions.stateful_layers import UnsupportedArchitecture

# One position beyond the original context changes these embeddings for all slots of a call.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
OWN_ATTENTION = "its attention does not go through Transformers' attention interface"
# Causal masks and tables of positions, which Transformers computes and stored in old files.
_UNUSED = (
    ".attn.bias", ".attn.masked_bias", ".attn.causal_mask",  # GPT-J, GPT-2, CodeGen
    ".attn.attention.bias", ".attn.attention.masked_bias",  # GPT-Neo
    ".embed_positions.weights",  # XGLM
)  # fmt: skip
# What formats of quantised weights store beside or instead of a matrix, by the end of its name.
_QUANTISED = {
    "qweight", "qzeros", "scales", "weight_scale", "weight_scale_inv", "weight_packed", "absmax",
    "SCB",
}  # fmt: skip


def check_length(checkpoint: Checkpoint, max_len: int) -> None:
    """Refuse LongRoPE if max_len exceeds its original context. Dynamic NTK embeddings change only
    beyond the checkpoint's context. Raises OutriderError "architecture"."""
    for rope in _ropes(checkpoint):
        original = rope.get("original_max_position_embeddings") or checkpoint.max_len
        if rope.get("rope_type") == "longrope" and max_len > original:
            raise OutriderError(
                "architecture",
                f"{checkpoint.source} uses LongRoPE position embeddings, which change beyond "
                f"{original} tokens and so cannot be compiled for {max_len}",
                f"Build with MAX_LEN={original}.",
            )


def _ropes(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings; for each kind of layer, if they differ."""
    parameters = getattr(checkpoint.text_config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def load(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model with all its weights, in evaluation mode, with eager attention. Raises as
    `read_weights` and `prepare`."""
    return prepare(read_weights(checkpoint, dtype), checkpoint)


def read_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    transform: Callable[[Lazy], Lazy] = lambda lazy: lazy,
) -> PreTrainedModel:
    """Load the model by Transformers. transform: replaces each packed tensor.

    Raises OutriderError "checkpoint" if weights are missing, damaged, or not part of the model,
    "architecture" if Transformers has no causal model of this kind, or the weights are those of
    another class.
    """
    model: PreTrainedModel
    info: dict[str, Any]
    stored: dict[str, Lazy] = {}
    options = {
        "dtype": dtype, "attn_implementation": "eager", "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are reported below
    }  # fmt: skip
    try:
        if checkpoint.packed:
            kind: Any = _causal_classes(checkpoint)[1][type(checkpoint.config)]
            stored = checkpoint.packed.tensors()
            tensors = {key: transform(each) for key, each in stored.items()}
            model, info = kind.from_pretrained(
                None, config=checkpoint.config, state_dict=tensors, **options
            )
        else:
            kind = (
                AutoModelForSeq2SeqLM if checkpoint.has_encoder else _causal_classes(checkpoint)[0]
            )
            kind = AutoModelForSpeechSeq2Seq if checkpoint.features else kind
            model, info = kind.from_pretrained(checkpoint.path, trust_remote_code=False, **options)
    except OutriderError:
        raise
    except Exception as error:  # noqa: BLE001 - safetensors, pickle and torch raise their own
        if is_out_of_memory(error):
            raise MemoryError from None
        raise _unread(checkpoint, error) from None
    unused = sorted(name for name in info["unexpected_keys"] if not name.endswith(_UNUSED))
    undescribed = (name for name in unused if name.rpartition(".")[2] in _QUANTISED)
    if not checkpoint.packed and (part := next(undescribed, None)):
        raise unsupported(checkpoint.source, f"its config.json does not describe {part}")
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise OutriderError(
            "checkpoint",
            f"the sizes of {len(mismatched)} weights of {checkpoint.source} differ from its "
            f"config.json, {name} first: {[*found]}, not {[*expected]}",
            "Check that config.json belongs to these weights.",
        )
    # Tables of sines, which Transformers computes and Pegasus' files lack.
    computed = {name for name in info["missing_keys"] if _is_computed(model, name)}
    missing = sorted(info["missing_keys"] - computed)
    unused = _without_later_layers(checkpoint, unused)
    unused = [name for name in unused if not _is_zero_bias(stored, name)]
    if missing or unused:
        raise _other_weights(checkpoint, type(model).__name__, missing, unused)
    return model


def _is_zero_bias(packed: dict[str, Lazy], name: str) -> bool:
    """Whether it is a bias that changes nothing: AutoGPTQ gave one to every matrix."""
    layer, _, part = name.rpartition(".")
    known = {name, f"{layer}.weight"} <= packed.keys()
    return part == "bias" and known and not packed[name][...].any()


def _without_later_layers(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    """The names that do not belong to the layers that follow the decoder's, if the checkpoint has
    such: they predict further tokens, and Transformers does not use them. Such a layer has a norm
    for the embedding of the token before (`enorm`), which a layer of the decoder lacks."""
    text = checkpoint.text_config
    count = getattr(text, "num_nextn_predict_layers", None)
    if type(count) is not int or not names:
        return names
    first = getattr(text, "num_hidden_layers", 0)
    layers = [f".layers.{i}." for i in range(first, first + count)]
    later = [layer for layer in layers if any(f"{layer}enorm." in name for name in names)]
    found = [name for name in names if any(layer in name for layer in later)]
    if found:
        what = f"layers that predict further tokens are left out: {len(later)}"
        note(f"{checkpoint.source}: {what}")
    return [name for name in names if name not in found]


def _unread(checkpoint: Checkpoint, error: Exception) -> OutriderError:
    """The error for a model that Transformers does not load."""
    why, damaged = first_line(error), isinstance(error, JSONDecodeError | UnicodeDecodeError)
    kinds = [rope.get("rope_type") for rope in _ropes(checkpoint)]
    if isinstance(error, KeyError) and error.args[0] in kinds:
        cause = f"{checkpoint.source}/config.json has a rope_type that Transformers lacks: {why}"
        return OutriderError("checkpoint", cause, "Correct it, or download the checkpoint again.")
    if isinstance(error, (ValueError, KeyError, ImportError)) and not damaged:
        if isinstance(error, KeyError):
            why = f"Transformers has no {why}"
        if "Unrecognized configuration class" in why:
            why = "Transformers has no decoder of this kind"
        if "trust_remote_code" in str(error):
            why = "it requires its own code, which is never run"
        return checkpoint.refused(why)
    if isinstance(error, UnpicklingError):  # torch's message advises to run the file's code
        why = "a .bin file contains more than tensors, or is damaged"
    return OutriderError(
        "checkpoint",
        f"the weights of {checkpoint.source} cannot be read: {why}",
        "Download the checkpoint again, as safetensors if there are any.",
    )


def _other_weights(
    checkpoint: Checkpoint, kind: str, missing: list[str], unused: list[str]
) -> OutriderError:
    """The error for weights that are not those of the class `kind`. If the checkpoint names another
    class and lacks no more than a head, it is an encoder, a classifier or a bare decoder."""
    differences = ("lacks", "of", missing), ("has", "that are not part of", unused)
    cause = " and ".join(
        f"{verb} {len(names)} weights {which} a {kind} ({names[0]} first)"
        for verb, which, names in differences
        if names
    )
    prefix = unused[0].partition(".")[0] + "." if unused else ""
    if any("lora" in name for name in unused):
        remedy = "Merge the adapter first (merge_and_unload)."
    elif len(missing) < 10 and checkpoint.config.architectures and checkpoint.architecture != kind:
        return checkpoint.refused(f"it {cause}")
    elif unused and {name.removeprefix(prefix) for name in unused} <= {*missing}:
        remedy = f"Save them again without {prefix} at the beginning of their names."
    elif unused:
        remedy = "Check that config.json belongs to these weights."
    else:
        remedy = "Download the checkpoint completely."
        if missing == ["lm_head.weight"]:
            remedy += " If its embeddings are its output matrix, set tie_word_embeddings to true."
    return OutriderError("checkpoint", f"{checkpoint.source} {cause}", remedy)


def _is_computed(model: PreTrainedModel, name: str) -> bool:
    module = model.get_submodule(name.rpartition(".")[0])
    return hasattr(module, "create_weight")


def prepare(model: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
    """Prepare the model for inference, in place, and drop modules that text does not pass through.
    Raises OutriderError "architecture" if it does not run on text alone, or its output matrix is
    unknown."""
    _freeze_rope(model)
    older_layers.simplify(model)
    model.train(False)
    model.requires_grad_(False)
    if checkpoint.text_config is not checkpoint.config and not checkpoint.has_encoder:
        _drop_other_modalities(model, checkpoint)
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise checkpoint.refused("Transformers does not know its output matrix")
    return model


def _causal_classes(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Transformers' auto class for the decoder, and its mapping. For a model that also takes images
    or audio it is the class that the checkpoint names, which has all of its weights."""
    kind = type(checkpoint.config)
    several: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(kind, None)
    if several is not None and (
        kind not in MODEL_FOR_CAUSAL_LM_MAPPING or checkpoint.architecture == several.__name__
    ):
        return AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING


class _RemovedModule(torch.nn.Module):
    """Replaces a removed tower: some models ask for its device, whatever their input."""

    device = torch.device("cpu")


def _drop_other_modalities(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Drop the modules that text does not pass through: vision and audio towers, and their
    projections."""
    used_modules = set()
    try:
        with torch.no_grad(), ExitStack() as hooks:
            for module in model.modules():
                hook = module.register_forward_pre_hook(lambda own, _: used_modules.add(own))
                hooks.enter_context(hook)
            model(input_ids=torch.tensor([[0, 1]]))
    except Exception as error:  # noqa: BLE001 - any model code may fail in any way here
        raise checkpoint.refused(f"it does not run on text alone ({first_line(error)})") from None
    for parent in (model, model.base_model):
        for name, child in [*parent.named_children()]:
            if used_modules.isdisjoint(child.modules()):
                setattr(parent, name, _RemovedModule())
    note(f"{checkpoint.source}: only its text decoder is exported, without images or audio")


def release_memory() -> None:
    """Return free memory that Python and the C library still hold to the operating system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim:
        trim(0)


def _freeze_rope(model: PreTrainedModel) -> None:
    """Make length-dependent embeddings constant: within the original context, which `check_length`
    ensures, they keep their initial values."""
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in _LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"
            rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
            if "short_mscale" in rope:  # Phi-3.5 MoE chooses frequencies and scale in each call
                module.config = SimpleNamespace(rope_parameters={"rope_type": "default"})
                module.rope_init_fn = partial(_frequencies, module, rope["short_mscale"])
        elif isinstance(kind, dict):
            module.rope_type = {
                layer: "default" if k in _LENGTH_DEPENDENT_ROPE else k for layer, k in kind.items()
            }


def _frequencies(module: Any, scale: float, *_: object) -> tuple[torch.Tensor, float]:
    """Read at each call: a tensor from outside a trace would be another constant of the program."""
    return module.inv_freq, scale


def learned_positions(model: PreTrainedModel, checkpoint: Checkpoint) -> int | None:
    """The size of a learned position table, None if positions are rotary."""
    rotary = any("rotary" in name.lower() for name, _ in model.named_modules())
    return None if rotary else checkpoint.max_len


def logits_width(model: PreTrainedModel) -> int:
    """V of the logits. Callers use this instead of the weight: a reference to it would keep all
    weights mapped."""
    outputs: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(outputs.weight.shape[0])


def first_token(model: PreTrainedModel) -> int | None:
    """The token that the model's sequences begin with, if any."""
    config, name = model.config.get_text_config(decoder=True), "bos_token_id"
    if model.config.is_encoder_decoder:
        config, name = model.config, "decoder_start_token_id"
    first = getattr(config, name, None)
    return first if isinstance(first, int) and 0 <= first < logits_width(model) else None


@dataclass(frozen=True)
class CacheShapes:
    """Per layer [H, D] of a row's keys and values: those of the text, and of the source, if any.

    source_rows: the fixed number of rows of an audio source; None for other models. encoder_width:
    of the encoder's output, 0 without an encoder. state_shapes: [H, D] of the rows that recurrent
    layers keep. reach: how many of these rows before its first token a call reads.
    """

    keys: list[list[int]]
    values: list[list[int]]
    source_keys: list[list[int]]
    source_values: list[list[int]]
    source_rows: int | None
    encoder_width: int
    state_shapes: list[list[int]]
    reach: int


def has_recurrent_state(model: PreTrainedModel) -> bool:
    """Whether its layers carry a recurrent state; False if it does not run with our cache."""
    cache = RecordingCache()
    with torch.no_grad(), patched_layers(model), suppress(Exception):
        model(input_ids=torch.tensor([[0, 1]]), past_key_values=cache, use_cache=True)
    return bool(cache.states)


def cache_shapes(model: PreTrainedModel, checkpoint: Checkpoint) -> CacheShapes:
    """Run two sequences of two tokens, and record the shapes that each layer caches.

    The configuration is not used, so an architecture that caches other shapes than its
    configuration suggests is handled correctly. Raises OutriderError "architecture" for models
    that do not go through Transformers' attention and cache interfaces.
    """
    kind = getattr(checkpoint.config, "attention_type", None)
    if kind == "block_sparse" or hasattr(checkpoint.config, "encoder_attention_type"):
        raise checkpoint.refused("its encoder uses sparse attention for long sources")
    rows = getattr(checkpoint.config, "decoder_vocab_size", None)  # of Marian
    if rows is not None and rows != checkpoint.config.vocab_size:
        raise checkpoint.refused("its source and its output have vocabularies of different sizes")
    if getattr(checkpoint.text_config, "attn_temperature_tuning", False):  # Llama 4
        raise checkpoint.refused("its attention takes positions from the length of the cache")
    if ignored := older_layers.ignored_field(checkpoint.config):
        raise checkpoint.refused(f"Transformers ignores {ignored} in its config.json")
    text, source = RecordingCache(), RecordingCache()
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[0, 1], [0, 2]]),
        "position_ids": torch.tensor([[0, 1], [0, 1]]),
        "past_key_values": text,
    }
    if checkpoint.has_encoder:
        caches, ids = TextAndSourceCache(text, source), torch.tensor([[0, 1]])
        source_example = example_source(checkpoint.features)
        inputs = {
            "decoder_input_ids": ids,
            "past_key_values": caches,
            **source_arguments(model, source_example),
        }
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = IMPLEMENTATION
            config._experts_implementation = IMPLEMENTATION
    traced_layers.clear()
    try:
        with torch.no_grad(), patched_layers(model):
            outputs = model(**inputs, use_cache=True)
        text.check()
    except UnsupportedArchitecture as error:
        raise checkpoint.refused(str(error)) from None
    except Exception as error:  # noqa: BLE001 - any model code may fail in any way here
        reason = f"it does not run with an explicit KV cache ({first_line(error)})"
        if isinstance(error, AttributeError) and isinstance(error.obj, RecordingCache):
            reason = f"it uses a cache attribute that is not supported ({error.name})"
        elif text.keys and not traced_layers:
            reason = OWN_ATTENTION
        raise checkpoint.refused(reason) from None
    layers = sorted(text.keys)
    if len(traced_layers) < len(layers) + len(source.keys):
        raise checkpoint.refused(OWN_ATTENTION)
    state_shapes = [list(shape) for _, shape in sorted(text.states.items())]
    if not layers or (layers != list(range(len(layers))) and not state_shapes):
        how_many = "not all" if layers else "none"
        raise checkpoint.refused(f"{how_many} of its layers keep a KV cache")
    if checkpoint.has_encoder and sorted(source.keys) != layers:
        raise checkpoint.refused("not all of its layers keep the source's keys")
    if not checkpoint.has_encoder:
        takes_positions = "position_ids" in signature(model.forward).parameters
        if not (takes_positions or older_layers.are_in(model)):
            raise checkpoint.refused("it takes no position_ids")
        first, second = outputs.logits[:, 0].float()
        atol = (1e-3 if outputs.logits.dtype == torch.float32 else 0.05) * float(first.abs().max())
        if not torch.allclose(first, second, rtol=0, atol=atol):
            raise checkpoint.refused("its tokens attend to later ones")
    sides = (text.keys, text.values, source.keys, source.values)
    keys, values, source_keys, source_values = (
        [[rows.shape[1], rows.shape[3]] for _, rows in sorted(side.items())] for side in sides
    )
    source_rows = source.keys[0].shape[2] if checkpoint.features else None
    encoder_width = outputs.encoder_last_hidden_state.shape[2] if checkpoint.has_encoder else 0
    return CacheShapes(
        keys, values, source_keys, source_values, source_rows, encoder_width, state_shapes,
        text.reach,
    )  # fmt: skip
