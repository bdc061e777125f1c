"""A GGUF file's own tokenizer: as its metadata describe it."""

from __future__ import annotations

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping as vocabularies

from runtime.files.errors import OutriderError

from .gguf import GgufFile

# Byte-level vocabularies whose texts are cut as GPT-2's, and those that have digits cut as well.
_GPT2_SPLIT = {"gpt-2", "phi-2", "mpt", "olmo", "jais"}
_DIGITS_SPLIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}


def read(name: str, file: GgufFile) -> PreTrainedTokenizerFast:
    """The file's own, with its chat template. Raises OutriderError "checkpoint" where the way of
    cutting texts into tokens is not known."""
    architecture, parts, options = vocabularies.get_gguf_tokenizer(str(file.path))
    cut = parts.get("pre_tokenizer_type")
    known = _GPT2_SPLIT | _DIGITS_SPLIT | vocabularies.GGUF_PRE_TOKENIZER_SPLITS.keys()
    if parts.get("tokenizer_type") == "gpt2" and cut not in known:
        raise OutriderError(
            "checkpoint",
            f"{name} cuts texts in a way that is not known: tokenizer.ggml.pre = {cut!r}",
            "Put the file into a folder with its original's tokenizer.json, and give the folder.",
        )
    backend, _ = vocabularies.convert_gguf_tokenizer(architecture, parts)
    if cut in _DIGITS_SPLIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    made: PreTrainedTokenizerFast
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **options)  # type: ignore[no-untyped-call]
    return made
