"""Loading a checkpoint's model: with all its weights and no others, as it is traced."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
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
from .decoder import NAME, Stored, traced_layers
from .encoder import Caches, example_source, reading
from .formats.packed import Lazy
from .functions.carrying import UnsupportedArchitecture, ours

# Positions beyond the original context change these embeddings for all slots of a call at once.
_LENGTH_DEPENDENT_ROPE = {"dynamic": "dynamic NTK", "longrope": "LongRoPE"}
_OLD = ".attn.masked_bias"  # a constant that files of GPT-2 once had


def check_length(checkpoint: Checkpoint, max_len: int) -> None:
    """Refuse position embeddings that change with the length of the longest sequence."""
    text = checkpoint.text_config
    parameters = getattr(text, "rope_parameters", None) or {}
    per_layer = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    for rope in per_layer:
        kind = rope.get("rope_type", "default")
        original = rope.get("original_max_position_embeddings") or checkpoint.max_len
        if kind in _LENGTH_DEPENDENT_ROPE and max_len > original:
            raise OutriderError(
                "architecture",
                f"{checkpoint.source} uses {_LENGTH_DEPENDENT_ROPE[kind]} position embeddings, "
                f"which change beyond {original} tokens and so cannot be compiled for {max_len}",
                f"Build with MAX_LEN={original}.",
            )


def load(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model with all its weights, in evaluation mode, with eager attention. Raises as `read`
    and `ready` do."""
    return ready(read(checkpoint, dtype), checkpoint)


def read(
    checkpoint: Checkpoint, dtype: torch.dtype, given: Callable[[Lazy], Lazy] = lambda lazy: lazy
) -> PreTrainedModel:
    """What Transformers makes of the files. given: what it gets of each tensor that is packed.

    Raises OutriderError "checkpoint" for weights that are missing, damaged, or more than the model
    takes, "architecture" where Transformers has no causal model of this kind.
    """
    model: PreTrainedModel
    info: dict[str, Any]
    options = {
        "dtype": dtype, "attn_implementation": "eager", "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are named below
    }  # fmt: skip
    try:
        if checkpoint.packed:
            kind: Any = _causal(checkpoint)[1][type(checkpoint.config)]
            tensors = {key: given(each) for key, each in checkpoint.packed.tensors().items()}
            model, info = kind.from_pretrained(
                None, config=checkpoint.config, state_dict=tensors, **options
            )
        else:
            kind = AutoModelForSeq2SeqLM if checkpoint.has_encoder else _causal(checkpoint)[0]
            kind = AutoModelForSpeechSeq2Seq if checkpoint.features else kind
            model, info = kind.from_pretrained(checkpoint.path, trust_remote_code=False, **options)
    except OutriderError:
        raise
    except (ValueError, KeyError, ImportError) as error:
        why = first_line(error)
        if isinstance(error, KeyError):
            why = f"Transformers has no {why}"
        if "trust_remote_code" in str(error):
            why = "it needs code of its own, which is never run"
        raise checkpoint.refused(why) from None
    except Exception as error:  # noqa: BLE001 - safetensors, pickle and torch raise their own
        if is_out_of_memory(error):
            raise MemoryError from None
        raise OutriderError(
            "checkpoint",
            f"the weights of {checkpoint.source} cannot be read: {first_line(error)}",
            "Download the checkpoint again.",
        ) from None
    if mismatched := sorted(info["mismatched_keys"]):
        name, there, wanted = mismatched[0]
        raise OutriderError(
            "checkpoint",
            f"{len(mismatched)} weights of {checkpoint.source} have other sizes than its "
            f"config.json says, {name} first: {[*there]}, not {[*wanted]}",
            "Check that config.json belongs to these weights.",
        )
    # Tables of sines, which Transformers makes and Pegasus' files do not have.
    made = {name for name in info["missing_keys"] if _made(model, name)}
    if missing := sorted(info["missing_keys"] - made):
        raise OutriderError(
            "checkpoint",
            f"{checkpoint.source} lacks {len(missing)} of its weights, {missing[0]} first",
            "Download the checkpoint completely.",
        )
    if unused := sorted(name for name in info["unexpected_keys"] if not name.endswith(_OLD)):
        adapter = any("lora" in name for name in unused)
        raise OutriderError(
            "checkpoint",
            f"{checkpoint.source} has {len(unused)} weights that a {type(model).__name__} does not "
            f"take, {unused[0]} first",
            "Merge the adapter first (merge_and_unload)."
            if adapter
            else "Check that config.json belongs to these weights.",
        )
    return model


def _made(model: PreTrainedModel, name: str) -> bool:
    module = model.get_submodule(name.rpartition(".")[0])
    return hasattr(module, "create_weight")


def ready(model: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
    """The same one, for inference, and without what no text runs through. Raises OutriderError
    "architecture" where that cannot be told."""
    _freeze_rope(model)
    model.train(False)
    model.requires_grad_(False)
    if checkpoint.text_config is not checkpoint.config and not checkpoint.has_encoder:
        _keep_text(model, checkpoint)
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise checkpoint.refused("Transformers does not say which is its output matrix")
    return model


def _causal(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Transformers' class for such decoders, and its mapping: of what also sees or hears, the class
    that the checkpoint names, which has all of its weights."""
    kind = type(checkpoint.config)
    several: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(kind, None)
    if several is not None and (
        kind not in MODEL_FOR_CAUSAL_LM_MAPPING or checkpoint.architecture == several.__name__
    ):
        return AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING


class _Absent(torch.nn.Module):
    """In the place of a tower; some models ask one where it is, whatever they are given."""

    device = torch.device("cpu")


def _keep_text(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Let go of what no text runs through: what sees or hears, and what projects from there."""
    ran = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: ran.add(module))
        for module in model.modules()
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[0, 1]]))
    except Exception as error:  # noqa: BLE001 - any model code may fail in any way here
        raise checkpoint.refused(f"it does not run on text alone ({first_line(error)})") from None
    finally:
        for hook in hooks:
            hook.remove()
    for parent in (model, model.base_model):
        for name, child in [*parent.named_children()]:
            if ran.isdisjoint(child.modules()):
                setattr(parent, name, _Absent())
    note(f"{checkpoint.source}: its text decoder alone is exported, without images or sound")


def give_back() -> None:
    """To the system the memory that Python and the C library keep between pieces still in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim:
        trim(0)


def _freeze_rope(model: PreTrainedModel) -> None:
    """Within the original context (`check_length`) these embeddings are their initial ones."""
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in _LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {
                layer: "default" if k in _LENGTH_DEPENDENT_ROPE else k for layer, k in kind.items()
            }


def learned_positions(model: PreTrainedModel, checkpoint: Checkpoint) -> int | None:
    """The size of a learned position table, None where positions are rotary."""
    rotary = any("rotary" in name.lower() for name, _ in model.named_modules())
    return None if rotary else checkpoint.max_len


def width(model: PreTrainedModel) -> int:
    """V of the logits. No variable of the caller may hold a weight: it would keep all mapped."""
    outputs: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return int(outputs.weight.shape[0])


def first_token(model: PreTrainedModel) -> int | None:
    """What the model's texts begin with, if anything does."""
    config, name = model.config.get_text_config(decoder=True), "bos_token_id"
    if model.config.is_encoder_decoder:
        config, name = model.config, "decoder_start_token_id"
    first = getattr(config, name, None)
    return first if isinstance(first, int) and 0 <= first < width(model) else None


@dataclass(frozen=True)
class CacheShapes:
    """Per layer (H, D) of a row's keys and values: of the text, and of the source, if any.

    source_rows: how many there are of a source that is no text; None for the others. states: the
    width of what the encoder makes of it, 0 where there is none. carried: (H, D) of the rows that
    recurrent layers keep. reach: how many of them before its first token a call reads.
    """

    keys: list[tuple[int, int]]
    values: list[tuple[int, int]]
    source_keys: list[tuple[int, int]] = field(default_factory=list)
    source_values: list[tuple[int, int]] = field(default_factory=list)
    source_rows: int | None = None
    states: int = 0
    carried: list[tuple[int, int]] = field(default_factory=list)
    reach: int = 0


def carries(model: PreTrainedModel) -> bool:
    """Whether its layers carry a state, as far as it runs with a cache of ours."""
    cache = Stored()
    with torch.no_grad(), ours(model), suppress(Exception):
        model(input_ids=torch.tensor([[0, 1]]), past_key_values=cache, use_cache=True)
    return bool(cache.states)


def cache_shapes(model: PreTrainedModel, checkpoint: Checkpoint) -> CacheShapes:
    """Run two tokens, in two versions, and note what each layer caches.

    Nothing is read from the configuration, so an architecture that caches otherwise than its
    configuration suggests is seen as it is. Raises OutriderError "architecture" for models that
    do not go through Transformers' attention and cache interfaces.
    """
    kind = getattr(checkpoint.config, "attention_type", None)
    if kind == "block_sparse" or hasattr(checkpoint.config, "encoder_attention_type"):
        raise checkpoint.refused("its attention to long sources is sparse")
    text, source = Stored(), Stored()
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([[0, 1], [0, 2]]),
        "position_ids": torch.tensor([[0, 1], [0, 1]]),
        "past_key_values": text,
    }
    if checkpoint.has_encoder:
        caches, ids = Caches(text, source), torch.tensor([[0, 1]])
        read = example_source(checkpoint.features)
        inputs = {"decoder_input_ids": ids, "past_key_values": caches, **reading(model, read)}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = NAME
            config._experts_implementation = NAME
    traced_layers.clear()
    try:
        with torch.no_grad(), ours(model):
            said = model(**inputs, use_cache=True)
        text.check()
    except UnsupportedArchitecture as error:
        raise checkpoint.refused(str(error)) from None
    except Exception as error:  # noqa: BLE001 - any model code may fail in any way here
        reason = f"it does not run with an explicit KV cache ({first_line(error)})"
        if isinstance(error, AttributeError) and isinstance(error.obj, Stored):
            reason = f"it asks its cache for what there is not ({error.name})"
        raise checkpoint.refused(reason) from None
    layers = sorted(text.keys)
    if len(traced_layers) < len(layers) + len(source.keys):
        raise checkpoint.refused(
            "its attention does not go through Transformers' attention interface"
        )
    carried = [shape for _, shape in sorted(text.states.items())]
    if not layers or (layers != list(range(len(layers))) and not carried):
        which = "not all" if layers else "none"
        raise checkpoint.refused(f"{which} of its layers keep a KV cache")
    if checkpoint.has_encoder and sorted(source.keys) != layers:
        raise checkpoint.refused("not all of its layers keep the source's keys")
    if not checkpoint.has_encoder:
        if "position_ids" not in signature(model.forward).parameters:
            raise checkpoint.refused("nobody can tell it at which positions its tokens stand")
        first, second = said.logits[:, 0].float()
        near = (1e-3 if said.logits.dtype == torch.float32 else 0.05) * float(first.abs().max())
        if not torch.allclose(first, second, rtol=0, atol=near):
            raise checkpoint.refused("its tokens look at those behind them")
    sides = (text.keys, text.values, source.keys, source.values)
    keys, values, source_keys, source_values = (
        [(rows.shape[1], rows.shape[3]) for _, rows in sorted(side.items())] for side in sides
    )
    fixed = source.keys[0].shape[2] if checkpoint.features else None
    states = said.encoder_last_hidden_state.shape[2] if checkpoint.has_encoder else 0
    return CacheShapes(keys, values, source_keys, source_values, fixed, states, carried, text.reach)
