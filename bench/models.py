"""The measured pair: a checkpoint of a known model's shape, made here, compiled as a user would.

The weights are random. Time and memory depend on shapes alone; what the pair says is noise, and
the draft agrees with the target about as often as two dice do.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .core.pair import Shape

VOCAB_SIZE = 49_152
END = "</s>"


TARGET = Shape(576, 1536, 30, 9, 3, VOCAB_SIZE)  # SmolLM-135M
DRAFT = Shape(192, 512, 2, 3, 3, VOCAB_SIZE)
QUICK_TARGET = Shape(256, 512, 4, 4, 2, 4096)
QUICK_DRAFT = Shape(64, 128, 2, 2, 2, 4096)
TINY_TARGET = Shape(64, 128, 2, 2, 2, 512)  # for tests of the benchmark itself
TINY_DRAFT = Shape(32, 64, 1, 2, 2, 512)


def make_checkpoint(shape: Shape, folder: Path, *, max_len: int) -> Path:
    """Write a checkpoint with random weights and a byte-level tokenizer, unless it is there."""
    stamp = folder / "bench.json"
    wanted = json.dumps({**asdict(shape), "max_len": max_len})
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(shape.hidden_size)
    config = LlamaConfig(
        **asdict(shape),
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer(shape.vocab_size).save_pretrained(folder)
    stamp.write_text(wanted)  # last: a checkpoint half written is made again
    return folder


def _tokenizer(vocab_size: int) -> Any:
    """One id a byte; the other ids have names that no merge ever forms."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused{i}>" for i in range(vocab_size - len(names))]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # its __init__ has no annotations
    return fast(tokenizer_object=backend, eos_token=END)


def make_bundle(
    name: str, target: Path, draft: Path | None, work: Path, *, max_len: int | None
) -> Path:
    """`python -m export` and `python -m engines`, whose caches make the second run short."""
    graphs, bundle = work / f"{name}-graphs", work / name
    _run("export", "--model", target, "--draft", draft or "none", "--out", graphs,
         "--cache", work / "cache", *(["--max-len", max_len] if max_len else []))  # fmt: skip
    _run("engines", "--graphs", graphs, "--out", bundle)
    return bundle


def _run(module: str, *arguments: object) -> None:
    """The command line itself; its stage lines go to stderr, a failure ends the benchmark."""
    main = importlib.import_module(f"{module}.__main__").main
    if code := main([str(argument) for argument in arguments]):
        raise SystemExit(code)
