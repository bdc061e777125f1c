"""Until the suites have moved: see bench.core.pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .core.pair import Shape as Shape
from .core.pair import bundle


def _tokenizer(vocab_size: int) -> Any:
    """One id a byte; the other ids have names that no merge ever forms."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<unused{i}>" for i in range(vocab_size - len(names))]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # its __init__ has no annotations
    return fast(tokenizer_object=backend, eos_token="</s>")


def make_bundle(
    name: str, target: Path, draft: Path | None, work: Path, *, max_len: int | None
) -> Path:
    return bundle(target, draft, work, max_len=max_len)
