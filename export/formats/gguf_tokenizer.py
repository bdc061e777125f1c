"""The tokenizer of a GGUF file, which splits texts as llama.cpp does."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import gguf_tokenizer_mapping as vocabularies

from runtime.files.errors import OutriderError

from .gguf import GgufFile

# Byte-level vocabularies whose texts are split as by GPT-2.
_SPLIT_AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "a.x-4.0", "trillion"}
# Those that are split in several steps: at digits first, or by DeepSeek's expressions.
_DIGITS = [
    pre_tokenizers.Digits(individual_digits=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False),
]
_EXPRESSIONS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_STEPS = {
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    "deepseek-coder": [
        *(pre_tokenizers.Split(Regex(each), "isolated") for each in _EXPRESSIONS),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
# Those whose texts begin with a BOS token unless a key says otherwise, and which contain words that
# no merges produce.
_SPLIT_AS_LLAMA3 = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
}  # fmt: skip
_ROLES = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
_MATCHED_WHOLE = (3, 4)  # llama.cpp's token types "control" and "user defined"


def read(name: str, file: GgufFile) -> PreTrainedTokenizerFast:
    """Build the file's tokenizer, with its chat template. Raises OutriderError "checkpoint" if its
    pre-tokenizer is unknown."""
    architecture, parts, options = vocabularies.get_gguf_tokenizer(str(file.path))
    pre_tokenizer = parts.get("pre_tokenizer_type")
    known = _SPLIT_AS_GPT2 | _STEPS.keys() | vocabularies.GGUF_PRE_TOKENIZER_SPLITS.keys()
    by_bytes = parts.get("tokenizer_type") == "gpt2"
    if by_bytes and pre_tokenizer not in known:
        raise OutriderError(
            "checkpoint",
            f"{name} has an unknown pre-tokenizer: tokenizer.ggml.pre = {pre_tokenizer!r}",
            "Put the file into a folder with the original's tokenizer.json, and give that folder.",
        )
    if by_bytes:
        backend = _byte_level(architecture, parts)
    else:
        backend, _ = vocabularies.convert_gguf_tokenizer(architecture, parts)
    if pre_tokenizer in _STEPS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(_STEPS[pre_tokenizer])
    if pre_tokenizer in _SPLIT_AS_LLAMA3:
        backend.model.ignore_merges = True
        options.setdefault("add_bos_token", True)
    if parts.get("tokenizer_type") == "llama":
        backend = _sentencepiece(architecture, backend, parts.get("add_prefix_space", True))
    tokenizer: PreTrainedTokenizerFast
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **options)  # type: ignore[no-untyped-call]
    return tokenizer


def _byte_level(architecture: str, parts: dict[str, Any]) -> Tokenizer:
    """Transformers' tokenizer with two corrections. Special and added tokens outside the byte-level
    alphabet, such as DeepSeek's with wide bars, stay whole: Transformers takes them for words that
    are marked by mistake. And GPT-2's tokens are removed, which it adds to every vocabulary after
    the model's last token."""
    tokens, kinds = parts["tokens"], parts.get("token_type") or ()
    bytes_ = set(bytes_to_unicode().values())  # type: ignore[no-untyped-call]
    matched = {t for t, kind in zip(tokens, kinds, strict=False) if kind in _MATCHED_WHOLE}
    matched |= {tokens[parts[role]] for role in _ROLES if role in parts}  # of any kind
    names = {f"<|token-{i}|>": t for i, t in enumerate(tokens) if t in matched and {*t} - bytes_}
    placeholders = {token: name for name, token in names.items()}
    parts = {**parts, "tokens": [placeholders.get(token, token) for token in tokens]}
    tokenizer = json.loads(vocabularies.convert_gguf_tokenizer(architecture, parts)[0].to_str())
    vocabulary = tokenizer["model"]["vocab"].items()
    tokenizer["model"]["vocab"] = {names.get(token, token): i for token, i in vocabulary}
    tokenizer["added_tokens"] = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in tokenizer["added_tokens"]
        if token["id"] < len(tokens)
    ]
    return Tokenizer.from_str(json.dumps(tokenizer))


def _sentencepiece(architecture: str, backend: Tokenizer, prefix: bool) -> Tokenizer:
    """Split as llama.cpp does: with a space before each stretch of text between special tokens, or
    none. All but three of Phi-3's special tokens absorb the spaces after them."""
    space = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    if architecture != "phi3":
        return backend
    tokenizer = json.loads(backend.to_str())
    for token in tokenizer["added_tokens"]:
        token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return Tokenizer.from_str(json.dumps(tokenizer))
