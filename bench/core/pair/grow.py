"""A trained Llama in a larger shape that says what it said: what is new computes and adds nothing.

- What is new may read anything, with random weights, but writes nothing: in `o_proj` and
  `down_proj` all is zero but the old block, so new layers, heads and MLP channels add nothing, and
  new channels of the residual stream stay zero. The old layers are spread evenly.
- RMSNorm divides by the hidden size, so its weights shrink by sqrt(H / H') and its eps by H / H'.
- Query heads keep the key/value head that they read.
- New tokens. Llama's output has no bias, and with tied embeddings a row of zeros has logit 0, in
  the midst of the others. Three new hidden channels make the bias. Old tokens have (c, c, 0) there,
  which nothing writes to, new ones (-d, d, f); the layers' norms have weight 0 there, the final one
  (w, -w, -w). An old row then adds w c c - w c c = 0 to its logit behind an old token, a new one
  -2 w c d / rms, of which d makes -BIAS where rms is the largest seen. Behind a new token, which no
  text has, f makes new ones lose against old ones too. The 2 c^2 that this adds to every sum of
  squares is taken out of eps, exactly. So a new token is not impossible, but its share is what it
  would be times e^-BIAS.

Nothing stored is above float16's 65,504, so that it exports to any precision, and nothing is a
denormal number. On a CPU zeros are as dear as other numbers: ONNX Runtime, one token, a 4096 x 4096
float32 product, one thread: 5.0 ms with random weights, 5.0 with two thirds of zeros, 5.2 with
zeros alone, 63 with denormals. A GPU at its power limit may clock higher where it reads zeros.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from export.checkpoint import find, refuse_architecture
from export.loading import load
from models.measure import sample
from runtime.files.errors import OutriderError
from runtime.files.folders import refuse_foreign, write_folder
from runtime.files.progress import stage

library: Any = transformers  # without annotations
library.logging.disable_progress_bar()

TOLERANCE = 1e-4  # relative to 1 + the largest logit, as the exporter's for float32
TEXTS, LENGTH = 4, 64  # compared
BIAS = 64.0  # a new token's logit is lower by this where the stream is largest, elsewhere by more
FINAL_WEIGHT = 2.0**15  # the largest w: half of float16's largest number
CONSTANTS = 3  # channels

# rows and columns of a layer's matrices, [out, in]
AXES = {
    "q_proj": ("queries", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "queries"),
    "gate_proj": ("inner", "hidden"),
    "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"),
}
WRITERS = ("o_proj", "down_proj")


def grow(source: Path, out: Path, sizes: dict[str, int]) -> None:
    """Write the checkpoint `source` with other sizes to `out`, which must be new or empty.

    sizes: fields of its configuration; others stay. Before the folder takes its place it is loaded
    as any other checkpoint, and all logits of text that the original wrote are compared. Raises
    OutriderError "checkpoint", "architecture", "option", "disk", "difference".
    """
    refuse_foreign(out, "config.json")
    model = load_llama(source)
    config = grown_config(model.config, sizes)
    texts = _own_texts(model)
    reference, rms = _listen(model, texts)
    with write_folder(out, "config.json") as partial:
        with stage("grow", "write"):
            grown = Growth(model, config, rms).model()
            write_checkpoint(grown, source, partial)
            name_tokens(partial, range(model.config.vocab_size, config.vocab_size))
        del grown
        with stage("grow", "compare with the original") as said:
            logits, _ = _listen(load_llama(partial), texts)
            logits = logits[..., : reference.shape[-1]]
            difference, largest = float((logits - reference).abs().max()), reference.abs().max()
            said.note = f"largest difference {difference:.1e} at {largest:.1f}"
        if not difference <= TOLERANCE * (1 + largest):
            raise OutriderError(
                "difference",
                f"a logit of the grown checkpoint differs by {difference:.1e}",
                "Please report this checkpoint's config.json and the sizes.",
            )


def load_llama(source: Path) -> Any:
    """The float32 model of a checkpoint. Raises OutriderError "checkpoint", "architecture" where it
    is no plain Llama."""
    checkpoint = find(str(source))
    config: Any = checkpoint.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise refuse_architecture(str(source), config, "only Llamas without biases can grow")
    return load(checkpoint, torch.float32)


def write_checkpoint(model: Any, source: Path, folder: Path) -> None:
    """The model, and all that `source` holds beside weights and configuration."""
    model.save_pretrained(folder)
    for path in source.iterdir():
        weights = path.name.endswith((".safetensors", ".bin", ".index.json"))
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


def _own_texts(model: Any) -> torch.Tensor:
    """int64 [TEXTS, N], written by the model at temperatures from 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(model.config.vocab_size, (TEXTS, 1), generator=generator)
    length = min(LENGTH, model.config.max_position_embeddings)
    texts: torch.Tensor = sample(model, first, length, torch.linspace(0, 1, TEXTS), generator)
    return texts


def _listen(model: Any, texts: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The logits [TEXTS, N, V], and the largest rms that the final norm divides by."""
    seen: list[float] = []

    def look(_: object, inputs: tuple[Any, ...]) -> None:
        seen.append(float(inputs[0].square().mean(-1).sqrt().max()))

    hook = model.model.norm.register_forward_pre_hook(look)
    with torch.no_grad():
        logits: torch.Tensor = model(texts, use_cache=False).logits
    hook.remove()
    return logits, max(seen)


def name_tokens(folder: Path, ids: range) -> None:
    """Give ids without a name one that no merge makes: an id without a name is masked before
    sampling, and sampling would cost what the old ids cost."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    names = content["model"]["vocab"]
    known = {*names.values(), *(token["id"] for token in content["added_tokens"])}
    names.update({f"<inflated{i}>": i for i in ids if i not in known})
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


# The weights


def grown_config(old: Any, sizes: dict[str, int]) -> Any:
    """A LlamaConfig of other sizes, with its eps. Raises OutriderError "option" for what cannot
    hold the old one."""
    new = type(old)(**{**old.to_dict(), **sizes, "dtype": "float32"})
    groups, old_groups = (c.num_attention_heads / c.num_key_value_heads for c in (new, old))
    constants = CONSTANTS if new.vocab_size > old.vocab_size else 0
    if (
        any(size < getattr(old, field) for field, size in sizes.items())
        or new.head_dim != old.head_dim
        or groups % 1
        or groups < old_groups
        or new.hidden_size < old.hidden_size + constants
    ):
        raise OutriderError(
            "option",
            f"{sizes} cannot hold the checkpoint",
            f"Choose a larger shape; more tokens take {CONSTANTS} hidden channels more.",
        )
    new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / new.hidden_size
    if constants:
        new.rms_norm_eps /= 2  # the other half is 2 c^2
    return new


class Growth:
    """Makes the grown model. old: the model, float32. config: of `grown_config`. rms: the largest
    that the old one's final norm was seen to divide by."""

    def __init__(self, old: Any, config: Any, rms: float):
        self._old, self._new = old.config, config
        self._weights: dict[str, torch.Tensor] = old.state_dict()
        self._random = torch.Generator().manual_seed(0)
        was, layers = self._old.num_hidden_layers, config.num_hidden_layers
        self._layers = {(i + 1) * layers // was - 1: i for i in range(was)}
        hidden, inner = (
            torch.arange(size) for size in (self._old.hidden_size, self._old.intermediate_size)
        )
        group, old_group = (
            c.num_attention_heads // c.num_key_value_heads for c in (config, self._old)
        )
        heads = torch.arange(self._old.num_attention_heads)
        queries = heads // old_group * group + heads % old_group  # beside the same key head
        keys = torch.arange(self._old.num_key_value_heads)
        self._places = {  # new and old indices
            "hidden": (hidden, hidden),
            "inner": (inner, inner),
            "queries": (self._channels(queries), self._channels(heads)),
            "keys": (self._channels(keys), self._channels(keys)),
        }
        self._shrink = math.sqrt(self._old.hidden_size / config.hidden_size)
        self._constants = (
            _constants(config.rms_norm_eps * config.hidden_size, BIAS * rms * self._shrink)
            if config.vocab_size > self._old.vocab_size
            else None
        )

    def model(self) -> Any:
        """The grown model, float32."""
        grown: Any = library.AutoModelForCausalLM.from_config(self._new, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in grown.named_parameters():
                weight.copy_(self._tensor(name, tuple(weight.shape)))
        return grown

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        module = name.removesuffix(".weight").split(".")
        if module[-1] in ("embed_tokens", "lm_head"):
            return self._table(shape, self._weights[name])
        if module[1] != "layers":
            return self._norm(shape, self._weights[name], last=True)
        old = self._layers.get(int(module[2]))
        like = self._weights[".".join(["model.layers", f"{old or 0}", *module[3:], "weight"])]
        if len(shape) > 1:
            return self._matrix(shape, like, module[-1], new=old is None)
        return self._norm(shape, like if old is not None else None)

    def _channels(self, heads: torch.Tensor) -> torch.Tensor:
        width: int = self._new.head_dim
        return (heads[:, None] * width + torch.arange(width)).flatten()

    def _normal(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        scale = float(like.std())
        return scale * torch.randn(*shape, generator=self._random)

    def _matrix(
        self, shape: Sequence[int], like: torch.Tensor, part: str, *, new: bool
    ) -> torch.Tensor:
        """[out, in]. like: the old one, or in a new layer one of the same part."""
        grown = torch.zeros(*shape) if part in WRITERS else self._normal(shape, like)
        if new:
            return grown
        (rows, old_rows), (columns, old_columns) = (self._places[axis] for axis in AXES[part])
        grown[rows[:, None], columns] = like[old_rows[:, None], old_columns]
        return grown

    def _norm(
        self, shape: Sequence[int], like: torch.Tensor | None, *, last: bool = False
    ) -> torch.Tensor:
        """[hidden]. like: the old one, None in a new layer."""
        grown = torch.ones(*shape)
        if like is not None:
            grown[: len(like)] = like * self._shrink
        if self._constants:
            grown[-CONSTANTS:] = self._constants[2] if last else 0
        return grown

    def _table(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """[vocab, hidden], of the embeddings or of an output that is not tied to them."""
        tokens, width = like.shape
        grown = self._normal(shape, like)
        grown[:tokens] = torch.nn.functional.pad(like, (0, shape[1] - width))
        if self._constants:
            grown[:tokens, -CONSTANTS:], grown[tokens:, -CONSTANTS:] = self._constants[:2]
        return grown


def _constants(energy: float, bias: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The constant channels of an old token, of a new one, and of the final norm's weights.

    energy: 2 c^2. bias: 2 w c d.
    """
    c = math.sqrt(energy / 2)
    # Large beside c, so that w c c, which must cancel, is small; and so that float16 holds w.
    d = max(8 * c, bias / (2 * c * FINAL_WEIGHT))
    w = bias / (2 * c * d)
    f = math.sqrt(2 * bias / w)
    return torch.tensor([c, c, 0]), torch.tensor([-d, d, f]), torch.tensor([w, -w, -w])
