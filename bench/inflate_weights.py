"""The weights of a grown Llama, which says what the old one says.

- What is new may read anything, with random weights, but writes nothing: in `o_proj` and
  `down_proj` all is zero but the old block, so new layers, heads and MLP channels add nothing, and
  new channels of the residual stream stay zero. The old layers are spread evenly.
- RMSNorm divides by the hidden size, so its weights shrink by sqrt(H / H') and its eps by H / H'.
- Query heads keep the key/value head that they read; where the new groups are smaller than the old
  ones, that head is there more than once.
- The head size grows by whole factors m only: pair i of the rotary embedding, of frequency
  theta^(-2 i / D), becomes pair i m of D' = D m. Queries are zero in the other pairs, and sqrt(m)
  larger to undo the attention's 1 / sqrt(D').
- New tokens. Llama's output has no bias, and with tied embeddings a row of zeros has logit 0, in
  the midst of the others. Three new hidden channels make the bias. Old tokens have (c, c, 0) there,
  which nothing writes to, new ones (-d, d, f); the layers' norms have weight 0 there, the final one
  (w, -w, -w). An old row then adds w c c - w c c = 0 to its logit behind an old token, a new one
  -2 w c d / rms, of which d makes -BIAS where rms is the largest seen. Behind a new token, which no
  text has, f makes new ones lose against old ones too. The 2 c^2 that this adds to every sum of
  squares is taken out of eps, exactly. So a new token is not impossible, but its share is what it
  would be times e^-BIAS; `bench/inflate.py` measures that.

Nothing stored is above float16's 65,504, so that it exports to any precision, and nothing is a
denormal number. On a CPU zeros are as dear as other numbers: ONNX Runtime, one token, a 4096 x 4096
float32 product, one thread: 5.0 ms with random weights, 5.0 with two thirds of zeros, 5.2 with
zeros alone, 63 with denormals. A GPU at its power limit may clock higher where it reads zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers

from runtime.files.errors import OutriderError, first_line

library: Any = transformers  # without annotations

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
OPTIONS = {
    "num_hidden_layers": "--layers",
    "hidden_size": "--hidden",
    "intermediate_size": "--inter",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "vocab_size": "--vocab",
}


def grown_config(old: Any, sizes: dict[str, int]) -> Any:
    """A LlamaConfig of other sizes, named as in OPTIONS, with its eps.

    Raises OutriderError "option" for what cannot hold the old one.
    """
    for field, size in sizes.items():
        if size < (least := getattr(old, field)):
            raise refuse(
                f"{OPTIONS[field]} {size} is less than the checkpoint's {least}",
                "Nothing can shrink: choose a larger shape or another checkpoint.",
            )
    try:
        new = type(old)(**{**old.to_dict(), **sizes, "dtype": "float32"})
    except Exception as error:  # noqa: BLE001 - its validation wraps whatever it finds
        cause = f"Transformers refuses this shape: {first_line(error)}"
        raise refuse(cause, "Choose sizes that go together.") from None
    heads, keys = new.num_attention_heads, new.num_key_value_heads
    if heads % keys:
        raise refuse(f"--heads {heads} is no multiple of --kv-heads {keys}", "Make it one.")
    if new.head_dim % old.head_dim:
        raise refuse(
            f"--head-dim {new.head_dim} is no multiple of the checkpoint's {old.head_dim}",
            "Only whole factors keep the frequencies of its rotary embedding.",
        )
    if new.vocab_size > old.vocab_size and new.hidden_size < old.hidden_size + CONSTANTS:
        raise refuse(
            f"--vocab {new.vocab_size} needs {CONSTANTS} hidden channels more",
            f"Add --hidden, of {old.hidden_size + CONSTANTS} or more.",
        )
    if new.vocab_size > old.vocab_size and old.rms_norm_eps <= 0:
        raise refuse("more tokens need an rms_norm_eps above 0", "Leave --vocab out.")
    new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / new.hidden_size
    if new.vocab_size > old.vocab_size:
        new.rms_norm_eps /= 2  # the other half is 2 c^2
    return new


def refuse(cause: str, remedy: str) -> OutriderError:
    return OutriderError("option", cause, remedy)


class Growth:
    """Makes the tensors. model: the old one, float32. config: of `grown_config`. rms: the largest
    that the old one's final norm was seen to divide by."""

    def __init__(self, model: Any, config: Any, rms: float, seed: int):
        old = model.config
        self._old, self._new, self._weights = old, config, model.state_dict()
        self._random = torch.Generator().manual_seed(seed)
        with torch.device("meta"):
            grown: Any = library.AutoModelForCausalLM.from_config(config)
        self._shapes = {name: tuple(p.shape) for name, p in grown.named_parameters()}
        self.parameters = sum(map(math.prod, self._shapes.values()))
        self._layers = {
            (i + 1) * config.num_hidden_layers // old.num_hidden_layers - 1: i
            for i in range(old.num_hidden_layers)
        }
        self._heads, keys = _heads(old, config)
        hidden, inner = torch.arange(old.hidden_size), torch.arange(old.intermediate_size)
        self._places = {  # new and old indices
            "hidden": (hidden, hidden),
            "inner": (inner, inner),
            "queries": self._channels(self._heads),
            "keys": self._channels(keys),
        }
        self._shrink = math.sqrt(old.hidden_size / config.hidden_size)
        self._constants = (
            _constants(config.rms_norm_eps * config.hidden_size, BIAS * rms * self._shrink)
            if config.vocab_size > old.vocab_size
            else None
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and float32 weights, each made when it is asked for."""
        for name, shape in self._shapes.items():
            module = name.removesuffix(".weight").split(".")
            if module[-1] in ("embed_tokens", "lm_head"):
                yield name, self._table(shape, self._weights[name])
            elif module[1] != "layers":
                yield name, self._norm(shape, self._weights[name], last=True)
            else:
                old = self._layers.get(int(module[2]))
                like = self._weights[
                    ".".join(["model.layers", f"{old or 0}", *module[3:], "weight"])
                ]
                if len(shape) > 1:
                    yield name, self._matrix(shape, like, module[-1], new=old is None)
                else:
                    yield name, self._norm(shape, like if old is not None else None)

    def _channels(self, heads: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of heads (new, old): a pair (i, i + D / 2) goes where its frequency is."""
        width, old = self._new.head_dim, self._old.head_dim
        pairs = torch.arange(old // 2) * (width // old)
        inside = torch.cat([pairs, pairs + width // 2])
        return (
            torch.cat([new * width + inside for new, _ in heads]),
            torch.cat([was * old + torch.arange(old) for _, was in heads]),
        )

    def _normal(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random) * like.std()

    def _matrix(
        self, shape: Sequence[int], like: torch.Tensor, part: str, *, new: bool
    ) -> torch.Tensor:
        """[out, in]. like: the old one, or in a new layer one of the same part."""
        grown = torch.zeros(*shape) if part in WRITERS else self._normal(shape, like)
        if new:
            return grown
        factor = self._new.head_dim // self._old.head_dim
        if part == "q_proj" and factor > 1:
            grown.view(-1, self._new.head_dim, shape[1])[[head for head, _ in self._heads]] = 0
            like = like * math.sqrt(factor)
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


def _heads(old: Any, new: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(new, old) of the query heads, and of the key/value heads that they read."""
    queries: list[tuple[int, int]] = []
    keys: list[tuple[int, int]] = []
    was, group = (c.num_attention_heads // c.num_key_value_heads for c in (old, new))
    for key in range(old.num_key_value_heads):
        for begin in range(0, was, group):  # where groups are smaller, a key head is repeated
            for i in range(min(group, was - begin)):
                queries.append((len(keys) * group + i, key * was + begin + i))
            keys.append((len(keys), key))
    if len(keys) > new.num_key_value_heads:
        raise refuse(
            f"{new.num_attention_heads} heads on {new.num_key_value_heads} cannot hold the "
            f"checkpoint's {old.num_attention_heads} on {old.num_key_value_heads}",
            f"Use --kv-heads {len(keys)} or more.",
        )
    return queries, keys
