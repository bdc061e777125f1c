"""Bundles of constructed pairs without written weights.

The weights file has the layout of all tensors, and contains the few that are not weights. The rest
is a hole, which takes no disk space and is never read: `constructed.fill_weights` computes the
weights in the engine's memory. So building an 8B pair takes only the time of its compilers: nothing
is hashed, and no logits are compared. Target and draft are compiled in parallel.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError, print_tracebacks
from runtime.files.graphs import (
    TOKENIZER_FILE,
    FileFacts,
    GraphFacts,
    Pair,
    TokenizerFacts,
    file_facts,
    slot_rows,
)
from runtime.files.manifest import MANIFEST_FILE, EngineFacts, Manifest, copied_files
from runtime.files.records import write_json
from runtime.files.torch_files import PROGRAM_FILE, WEIGHTS_FILE

from ...core.pair import TARGET, Shape
from ...core.pair.grow import name_tokens
from .constructed import DTYPE, ROPE_THETA, SHAPES, SOURCE

MAX_GAMMA = 8
NO_DIGEST = "0" * 64  # for files that are not hashed


def build(name: str, folder: Path, sm: str) -> None:
    """Write folder/bundle, which `load` opens with verify=False, and each model's configuration to
    folder/target and folder/draft. name: key of `SHAPES`. sm: as in `make engines`. Raises
    OutriderError("backend")."""
    from engines.aotinductor import builder

    shutil.rmtree(folder, ignore_errors=True)  # so that no old bundle is measured
    pair, bundle = SHAPES[name], folder / "bundle"
    capacity = slot_rows(pair.length, MAX_GAMMA)
    make = partial(_compile, folder, name, pair.length, capacity, sm)
    # Spawned instead of forked, so that the parent's threads and GPU driver are not inherited.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        roles = "target", "draft"
        built = dict(zip(roles, pool.map(make, roles, map(pair.shape, roles)), strict=True))
    facts = {role: each[0] for role, each in built.items()}
    engines = {role: each[1] for role, each in built.items()}
    pair_facts = Pair(
        target=facts["target"], draft=facts["draft"],
        tokenizer=_tokenizer(bundle / "tokenizer", pair.target.vocab_size),
        vocab_size=pair.target.vocab_size, max_len=pair.length, max_gamma=MAX_GAMMA,
        capacity=capacity,
    )  # fmt: skip
    files = copied_files(pair_facts, engines) | {
        f"{role}/{engine.file}": file_facts(bundle / role / engine.file)
        for role, engine in engines.items()
    }
    manifest = Manifest(
        name=name, backend="aotinductor", versions=builder.versions(), slots=1, pair=pair_facts,
        files=files, engines=engines,
    )  # fmt: skip
    write_json(bundle / MANIFEST_FILE, "manifest", manifest)


def _compile(
    folder: Path, name: str, length: int, capacity: int, sm: str, role: str, shape: Shape
) -> tuple[GraphFacts, EngineFacts]:
    from engines.aotinductor import builder

    place = folder / "bundle" / role
    try:
        facts = write_graph(shape, length, capacity, place, f"{SOURCE} {name}", folder / role)
        targets = builder.targets(sm, facts.dtype)
        plan = builder.plan({role: facts}, 1, MAX_GAMMA, targets, None)
        return facts, builder.compile(role, place, place, facts, plan[role])
    except OutriderError as error:
        print_tracebacks(error)  # the traceback is not sent to the parent
        raise


def write_graph(
    shape: Shape, length: int, capacity: int, folder: Path, source: str, config_folder: Path
) -> GraphFacts:
    """Write the graph in torch's format, with a hole for each weight. capacity: rows of a slot."""
    import torch

    from export import program
    from export.decoder import Decoder, example

    folder.mkdir(parents=True)
    model = _uninitialised_model(shape, length)
    model.config.save_pretrained(config_folder)
    heads, layers = shape.num_key_value_heads, shape.num_hidden_layers
    rows = [(heads, shape.hidden_size // shape.num_attention_heads)] * layers
    inputs = example(rows, rows, program.EXAMPLE_ROWS, getattr(torch, DTYPE))
    program.save(program.trace(Decoder(model, None).eval(), inputs), folder, holes=True)
    listed = [list(row) for row in rows]
    return GraphFacts(
        key="", source=source, architecture="LlamaForCausalLM", parameters=model.num_parameters(),
        dtype=DTYPE, vocab_size=shape.vocab_size, max_len=length, capacity=capacity,
        key_shapes=listed, value_shapes=listed, max_difference=None, tolerance=0.0,
        comparison="without weights",
        versions={}, files={
            PROGRAM_FILE: file_facts(folder / PROGRAM_FILE),
            WEIGHTS_FILE: FileFacts((folder / WEIGHTS_FILE).stat().st_size, NO_DIGEST),
        },
    )  # fmt: skip


def _uninitialised_model(shape: Shape, length: int) -> Any:
    """A model of that shape with uninitialised weights, which take no memory until touched."""
    import torch
    import transformers

    from export.functions.own import IMPLEMENTATION

    library: Any = transformers
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with torch.device("meta"):
        model = library.AutoModelForCausalLM.from_config(
            config_of(shape, length), dtype=getattr(torch, DTYPE)
        )
    model.to_empty(device="cpu")
    # Its buffers are computed, not loaded.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.config._attn_implementation = IMPLEMENTATION
    return model.train(False).requires_grad_(False)


def config_of(shape: Shape, length: int) -> Any:
    """The LlamaConfig of a shape."""
    import transformers

    library: Any = transformers
    return library.LlamaConfig(
        **asdict(shape), max_position_embeddings=length, tie_word_embeddings=False,
        rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )  # fmt: skip


def _tokenizer(folder: Path, vocab_size: int) -> TokenizerFacts:
    """Write the bundled pair's tokenizer, with a name for every id; returns its facts."""
    folder.mkdir(parents=True)
    path = folder / TOKENIZER_FILE
    shutil.copyfile(TARGET / TOKENIZER_FILE, path)
    name_tokens(folder, range(vocab_size))
    assert len(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]) <= vocab_size
    return TokenizerFacts(
        key="", vocab_size=vocab_size, eos_token_ids=[], special_tokens={}, chat_template=False,
        files={TOKENIZER_FILE: file_facts(path)},
    )  # fmt: skip
