"""The models of the pair, their losses, and the training loop.

Nothing here depends on the source of the text: a `Batches` function returns token windows.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

BATCH_TOKENS = 4096  # tokens per optimizer step, whatever the length of the windows
MICRO_TOKENS = 2048  # tokens per forward and backward pass: activations then fit a CPU's cache
LENGTHS = (256, 256, 256, 256, 512, 512, 512, 2048)  # window lengths, drawn per step
WARMUP_STEPS = 100
TIMED_STEPS = 12  # first steps, timed to compute how many fit into the minutes
CHECKPOINT_SECONDS = 60
LOG_SECONDS = 10

Loss = Callable[[torch.Tensor], torch.Tensor]  # tokens [B, N] -> sum over all positions, nats
Batches = Callable[[int, torch.Generator], torch.Tensor]  # length, randomness -> tokens [B, length]


class TrainError(Exception):
    """An error with a cause and a remedy, shown without a traceback."""


def log(line: str) -> None:
    print(line, flush=True)


def build(
    shape: Mapping[str, int], vocab_size: int, positions: int, separator: int, seed: int
) -> LlamaForCausalLM:
    """A freshly initialized Llama with tied embeddings, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=separator,
        eos_token_id=separator,
        # The embedding row of a padding token gets no gradient, and here it would be the separator.
        pad_token_id=None,
        **shape,
    )
    return LlamaForCausalLM(config)


def autocast() -> torch.autocast:
    """bfloat16 products over float32 weights: 1.6 times as fast as float32 on a CPU with AMX."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile the layers at the first use of each shape; all layers share the code of a shape."""
    # Three window lengths, for the draft and its teacher, with and without gradients: more than 8.
    torch._dynamo.config.recompile_limit = 32
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup, then a cosine down to a fiftieth of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def next_token_loss(model: LlamaForCausalLM) -> Loss:
    """Cross-entropy against the text, the target's loss."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        hidden = measure.hidden_states(model, tokens)[:, :-1].flatten(0, 1)
        labels = tokens[:, 1:].flatten().split(measure.ROWS)
        pieces = zip(measure.logit_pieces(model, hidden), labels, strict=True)
        return sum(F.cross_entropy(logits, label, reduction="sum") for logits, label in pieces)

    return loss


def divergence(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Sum over rows of KL(p || q) + 1 - alpha, from float32 logits [R, V].

    1 - alpha is the total variation distance of p and q (Corollary 3.6), the quantity that matters;
    but its gradient is weak where q is far off, which is where that of KL is strong.
    """
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    return (p * (log_p - log_q)).sum() + (1 - measure.acceptance(p, q)).sum()


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, compiled: bool) -> Loss:
    """The draft's divergence from the target's whole distribution, at every position."""
    rows_divergence = divergence
    if compiled:  # the dozen passes over [ROWS, V] become two or three
        rows_divergence = torch.compile(divergence, dynamic=False)
        compile_layers(target)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target_hidden = measure.hidden_states(target, tokens).flatten(0, 1)
        hidden = measure.hidden_states(draft, tokens).flatten(0, 1)
        total = torch.zeros(())
        draft_pieces = measure.logit_pieces(draft, hidden)
        for target_rows, draft_logits in zip(
            target_hidden.split(measure.ROWS), draft_pieces, strict=True
        ):
            with torch.no_grad():
                target_logits = target.lm_head(target_rows).float()
            total = total + rows_divergence(target_logits, draft_logits)
        return total

    return loss


@dataclass
class Trainer:
    """Trains one model from its initial weights to the last optimizer step, with checkpoints."""

    name: str
    model: LlamaForCausalLM
    loss: Loss
    batches: Batches
    peak_rate: float
    minutes: float  # determines the number of steps if `steps` is None
    steps: int | None
    seed: int
    work: Path
    compiled: bool

    def run(self) -> dict[str, float]:
        """Train, or continue training; returns the entries of the model card."""
        self.path = self.work / f"{self.name}.pt"
        self.optimizer = self._optimizer()
        self.step, self.tokens, self.smoothed_loss, self.seconds = 0, 0, 0.0, 0.0
        self._continue()
        if self.compiled:
            compile_layers(self.model)
        self.model.train()
        last_save = last_log = time.monotonic()
        last_log_step, untimed_seconds = self.step, 0.0
        while self.steps is None or self.step < self.steps:
            started = time.monotonic()
            self._one_step()
            now = time.monotonic()
            self.seconds += now - started
            if self.step == TIMED_STEPS // 3:
                untimed_seconds = (
                    self.seconds
                )  # not representative: memory and kernels were being set up
            if self.steps is None and self.step == TIMED_STEPS:
                pace = (self.seconds - untimed_seconds) / (self.step - TIMED_STEPS // 3)
                self.steps = max(self.step, int(self.minutes * 60 / pace))
                log(
                    f"{self.name}: {self.steps} steps of {BATCH_TOKENS} tokens fit into "
                    f"{self.minutes:g} minutes"
                )
            if now - last_log > LOG_SECONDS or self.step == self.steps:
                self._log_progress((self.step - last_log_step) / (now - last_log))
                last_log, last_log_step = now, self.step
            if now - last_save > CHECKPOINT_SECONDS or self.step == self.steps:
                self._save()
                last_save = now
        self.model.eval()
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.step,
            "tokens": self.tokens,
            "minutes": round(self.seconds / 60, 1),
            "final_training_loss": round(self.smoothed_loss, 4),
        }

    def _optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        gains = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": gains, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    def _one_step(self) -> None:
        # Seeded by the step, so that a continued run sees the same data as an uninterrupted one.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        pick = int(torch.randint(0, len(LENGTHS), (), generator=generator))
        batch = self.batches(LENGTHS[pick], generator)
        total = 0.0
        for piece in batch.split(max(1, MICRO_TOKENS // batch.shape[1])):
            with autocast():
                loss = self.loss(piece) / batch.numel()
            loss.backward()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise TrainError(
                f"the {self.name}'s loss became {total}. Delete {self.path} and try another --seed"
            )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        # The timed steps are within the warmup, where the rate does not depend on the total.
        rate = learning_rate(self.step, self.steps or 10**9, self.peak_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.numel()
        self.smoothed_loss += (total - self.smoothed_loss) * max(0.02, 1 / self.step)

    def _log_progress(self, steps_per_second: float) -> None:
        left = ((self.steps or self.step) - self.step) / steps_per_second / 60
        log(
            f"{self.name}: step {self.step}/{self.steps or '?'}  loss {self.smoothed_loss:.3f}  "
            f"{steps_per_second * BATCH_TOKENS:,.0f} tokens/s  {left:.1f} min left"
        )

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "steps": self.steps, "seconds": self.seconds,
            "tokens": self.tokens, "smooth": self.smoothed_loss,
        }  # fmt: skip
        torch.save(state, self.path.with_suffix(".new"))
        os.replace(self.path.with_suffix(".new"), self.path)  # never a half-written checkpoint

    def _continue(self) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.smoothed_loss, self.seconds = state["smooth"], state["seconds"]
        self.steps = self.steps or state["steps"]
        log(f"{self.name}: continuing at step {self.step} of {self.steps}")
