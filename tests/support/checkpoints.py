"""Tiny random checkpoints of many architectures, and what the exporter makes of them, made once.

Nothing is downloaded. A checkpoint has two layers of 64 units and the byte tokenizer below; its
weights are larger than a fresh model's, so that its argmax changes from token to token, and its
biases and norms are random too, so that losing one of them shows.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch._inductor
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from engines.bundle import build
from engines.registry import find
from export.pair import export

EOS = "</s>"
TOKENS = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]  # 257: one of each byte
VOCAB_SIZE = len(TOKENS)
CONTEXT = 256
WINDOW = 12  # of every architecture that has a sliding one
MAX_LEN, MAX_GAMMA = 128, 8  # of the bundles, unless a test says otherwise

torch.set_num_threads(1)  # models of this size only lose by more, and test workers share the cores


def _like(common: dict[str, Any], cls: type[PretrainedConfig], **own: Any) -> Architecture:
    """A configuration, with overrides."""
    return lambda **overrides: cls(**{**common, **own, **overrides})


Architecture = Callable[..., PretrainedConfig]
_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_LONG = {**_SIZES, "max_position_embeddings": CONTEXT}
_LLAMA = {**_IDS, **_LONG, "intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": 0}
_llama = partial(_like, _LLAMA)
# Of the generation before Llama, most with names of their own for the same sizes.
_gpt = partial(_like, _IDS)
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}

# Untied: with embeddings scaled by sqrt(64) a tied random Gemma only repeats its input.
_GEMMA = {"head_dim": 16, "tie_word_embeddings": False}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _rope(kind: str, original: int, **own: Any) -> dict[str, Any]:
    of_it = {"rope_theta": 1e4, "rope_type": kind, "original_max_position_embeddings": original}
    return {"rope_parameters": {**of_it, **own}}


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _llama(transformers.LlamaConfig, tie_word_embeddings=True),
    "llama3": _llama(
        transformers.LlamaConfig,
        **_rope("llama3", 64, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "mistral": _llama(transformers.MistralConfig, sliding_window=WINDOW),
    "qwen2": _llama(transformers.Qwen2Config),
    "qwen3": _llama(transformers.Qwen3Config, head_dim=16),
    "gemma": _llama(transformers.GemmaConfig, **_GEMMA),
    "gemma2": _llama(
        transformers.Gemma2Config, **_GEMMA, **_MIXED, query_pre_attn_scalar=16,
        # Low enough to bend scores and logits of this size.
        attn_logit_softcapping=2.0, final_logit_softcapping=4.0,
    ),
    "gemma3": _llama(
        transformers.Gemma3TextConfig, **_GEMMA, **_MIXED, query_pre_attn_scalar=16
    ),
    "phi": _llama(transformers.PhiConfig),
    "phi3": _llama(
        transformers.Phi3Config, original_max_position_embeddings=CONTEXT, resid_pdrop=0.0
    ),
    "phi3-longrope": _llama(
        transformers.Phi3Config, original_max_position_embeddings=CONTEXT // 2,
        **_rope("longrope", CONTEXT // 2, short_factor=[1.5] * 8, long_factor=[4.0] * 8),
    ),
    "llama-dynamic": _llama(
        transformers.LlamaConfig, **_rope("dynamic", CONTEXT // 2, factor=2.0)
    ),
    "gpt2": _gpt(transformers.GPT2Config, **_GPT2),
    "opt": _gpt(
        transformers.OPTConfig, **_LONG, word_embed_proj_dim=64, ffn_dim=96, pad_token_id=0
    ),
    "gpt-neox": _gpt(transformers.GPTNeoXConfig, **_LONG, intermediate_size=96),
    "olmo2": _llama(transformers.Olmo2Config),
    "stablelm": _llama(transformers.StableLmConfig),
    "granite": _llama(transformers.GraniteConfig),
    "cohere": _llama(transformers.CohereConfig),
    "smollm3": _llama(transformers.SmolLM3Config),
    "starcoder2": _llama(transformers.Starcoder2Config, sliding_window=WINDOW),
    "mixtral": _llama(transformers.MixtralConfig, num_local_experts=4),
    "qwen3-moe": _llama(
        transformers.Qwen3MoeConfig, head_dim=16, num_experts=4, **_EXPERTS
    ),
    "deepseek3": _llama(
        transformers.DeepseekV3Config, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, **_EXPERTS,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "gpt-oss": _llama(
        transformers.GptOssConfig, num_local_experts=4, num_experts_per_tok=2, head_dim=16,
        **_MIXED, rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    ),
    # What the exporter refuses.
    "falcon": _gpt(transformers.FalconConfig, **_SIZES),
    "bloom": _gpt(transformers.BloomConfig, hidden_size=64, n_layer=2, n_head=4),
    "gptj": _gpt(transformers.GPTJConfig, **_GPT2, rotary_dim=8),
    "mamba": _gpt(transformers.MambaConfig, hidden_size=64, num_hidden_layers=2),
    "t5": _gpt(transformers.T5Config, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
}  # fmt: skip
NO_GRAPH = {"falcon", "bloom", "gptj", "mamba", "t5"}
SMALL = {"num_hidden_layers": 1}
# An export of one layer takes half the time.
ONE_LAYER = {"llama3", "mistral", "qwen3", "phi3", "opt", "gpt-neox", "olmo2", "mixtral"}


def tokenizer(tokens: Sequence[str] = TOKENS) -> PreTrainedTokenizerFast:
    """Bytes without merges; `tokens` in the order of their ids."""
    model = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=EOS)


def write(
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    blur: float = 0.0,
    tokens: Sequence[str] = TOKENS,
    **overrides: Any,
) -> Path:
    """A checkpoint of the architecture `name`, in the Hugging Face layout.

    blur: size of the noise on the weights, relative to them: a draft that agrees with the
    checkpoint of the same seed now and then. overrides: fields of the configuration.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = ARCHITECTURES[name](**overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if config.is_encoder_decoder:
            model = transformers.T5ForConditionalGeneration(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                # Layers that speak louder than the embeddings: text that depends on its context.
                inner = ".layers." in path or ".h." in path
                size = 0.1 if parameter.dim() < 2 else 0.3 if inner else 0.15
                parameter.add_(torch.randn_like(parameter), alpha=size)
            torch.manual_seed(seed + 1)
            for parameter in model.parameters() if blur else ():
                noise = torch.randn_like(parameter)
                parameter.add_(noise * parameter.std(correction=0), alpha=blur)
    model.save_pretrained(folder)
    tokenizer(tokens).save_pretrained(folder)
    return folder


def _own_files(folder: Path) -> None:
    """Files in place of links into the cache: no bundle that a test damages may become the owner of
    what others build from."""
    for link in filter(Path.is_symlink, list(folder.rglob("*"))):
        content = link.read_bytes()
        link.unlink()
        link.write_bytes(content)


@contextmanager
def _compiled_once(cache: Path) -> Iterator[None]:
    """AOTInductor's packages hold code and no weights, so models that differ in those share one."""
    real = torch._inductor.aoti_compile_and_package

    def compile(program: Any, *, package_path: str, **options: Any) -> None:
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in program.state_dict.items()}
        key = hashlib.sha256(f"{program.graph} {shapes} {options}".encode()).hexdigest()[:12]
        kept = cache / f"{key}.pt2"
        if not kept.exists():
            real(program, package_path=package_path, **options)
            shutil.copyfile(package_path, kept)
        else:
            shutil.copyfile(kept, package_path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "aoti_compile_and_package", compile)
        yield


class Workshop:
    """Checkpoints, graphs and bundles by what they are made from, shared by all tests of a run.

    The folders belong to everybody: copy before you damage one. Workers of one run share them too.
    """

    def __init__(self, root: Path):
        self.root = root
        self.cache = root / "cache"
        root.mkdir(parents=True, exist_ok=True)

    def checkpoint(self, name: str, **options: Any) -> Path:
        """See `write`."""
        options = {name: value for name, value in options.items() if (name, value) != ("seed", 0)}
        with self._once("checkpoint", name, options) as (folder, made):
            if not made:
                write(folder.with_suffix(".part"), name, **options).rename(folder)
        return folder

    def example(self, name: str) -> Path:
        """The checkpoint that stands for this architecture, of one layer where all are alike."""
        layers = SMALL if name in ONE_LAYER else {}
        # Seed 0 happens to make a Granite that repeats itself.
        return self.checkpoint(name, seed=1 if name == "granite" else 0, **layers)

    def graphs(self, target: Path, draft: Path | None = None, **options: Any) -> Path:
        """What `python -m export` writes. options: those of `export.pair.export`."""
        options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, **options}
        with self._once("graphs", f"{target}+{draft}", options) as (folder, made):
            if not made:
                source = str(draft) if draft else None
                export(str(target), source, folder, cache=self.cache, **options)
                _own_files(folder)
        return folder

    def bundle(
        self,
        target: Path,
        draft: Path | None = None,
        *,
        backend: str = "onnxruntime",
        measure: bool = False,
        **options: Any,
    ) -> Path:
        """What `python -m engines` writes, for one slot. options: as `graphs`. measure: what its
        bits depend on, which takes seconds."""
        form = {"form": "torch"} if find(backend).FORMAT == "torch" else {}
        graphs = self.graphs(target, draft, **form, **options)
        measured = {"measure": True} if measure else {}
        with self._once("bundle", str(graphs), measured) as (folder, made):
            if not made:
                # Also on a machine with a GPU.
                sm = "cpu" if backend == "aotinductor" else ""
                with _compiled_once(self.cache):
                    build(graphs, folder, backend=backend, slots=1, sm=sm, measure=measure)
        return folder

    def pair(self, backend: str = "onnxruntime") -> tuple[Path, Path]:
        """The checkpoints that most tests share: two that disagree, of one layer where a compile
        takes half a minute."""
        layers = SMALL if backend == "aotinductor" else {}
        return self.checkpoint("llama", **layers), self.checkpoint("llama", seed=7, **layers)

    @contextmanager
    def _once(self, kind: str, name: str, options: dict[str, Any]) -> Iterator[tuple[Path, bool]]:
        """The folder of these ingredients, whether it is made, and nobody else making it."""
        key = hashlib.sha256(repr((name, sorted(options.items()))).encode()).hexdigest()[:12]
        folder = self.root / f"{kind}-{Path(name).name.split('+')[0]}-{key}"
        lock = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder, folder.is_dir()
        finally:
            os.close(lock)
