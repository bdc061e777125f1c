"""Train the bundled pair: a small Llama on Python's standard library, and its draft.

    python models/train.py --smoke                     # all stages in a minute or two
    python models/train.py --compile --steps-target 1300 --steps-draft 1400  # the bundled pair

Stages: corpus -> tokenizer -> target -> text sampled from the target -> draft -> figures. Each
saves its result in the work folder. After an interruption the same command continues from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

# Threads that spin while they wait starve each other as soon as any other process is running.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import corpus
    import measure
    import torch
    from trainer import (
        BATCH_TOKENS,
        Batches,
        Trainer,
        TrainError,
        autocast,
        build,
        distillation_loss,
        log,
        next_token_loss,
    )
    from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast
except ImportError as missing:
    sys.exit(f"error: {missing}. Install it: pip install torch transformers tokenizers numpy")

VOCAB_SIZE = 4096
SAMPLED_LENGTH = 256  # one of the trainer's window lengths
PROMPT_LENGTH = 32
GENERATED_LENGTH = 256

TARGET_SHAPE = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
DRAFT_SHAPE = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
TARGET_RATE, DRAFT_RATE = 2e-3, 4e-3  # peak learning rates


@dataclass(frozen=True)
class Plan:
    """Amounts of training and data; the shapes of the models and the recipe are constants above."""

    minutes_target: float
    minutes_draft: float
    steps_target: int | None
    steps_draft: int | None
    compiled: bool = False
    corpus_bytes: int | None = None
    sampled_windows: int = 512  # from the target, to train the draft
    held_out_windows: int = 192
    generated_windows: int = 64


SMOKE = Plan(
    0, 0, 2, 2, corpus_bytes=3_000_000, sampled_windows=4, held_out_windows=4, generated_windows=2
)  # fmt: skip


def new_model(shape: dict[str, int], seed: int) -> LlamaForCausalLM:
    return build(shape, VOCAB_SIZE, corpus.MAX_POSITIONS, corpus.SEPARATOR_ID, seed)


def plain_copy(model: LlamaForCausalLM, shape: dict[str, int]) -> LlamaForCausalLM:
    """The same weights in uncompiled layers, for sampling, whose shapes change at every step."""
    copy = new_model(shape, 0).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def prepare(
    plan: Plan, seed: int, work: Path
) -> tuple[PreTrainedTokenizerFast, dict[str, corpus.TokenStream], dict[str, int]]:
    """Corpus and tokenizer, created once and then read from the work folder."""
    corpus_file = work / "corpus.pt"
    if not corpus_file.exists():
        texts = corpus.collect(plan.corpus_bytes)
        if not texts.train or not texts.held_out:
            raise TrainError(
                "this Python has no readable standard library sources. Use a Python that was "
                "installed with them (not a zipped or stripped one)"
            )
        tokenizer = corpus.train_tokenizer(texts.train, VOCAB_SIZE)
        if len(tokenizer) != VOCAB_SIZE:
            raise TrainError(
                f"the corpus yields only {len(tokenizer)} of {VOCAB_SIZE} tokens. Use a Python "
                "whose standard library is complete"
            )
        tokenizer.save_pretrained(work / "tokenizer")
        facts = {}
        streams = {}
        for split, documents in (("train", texts.train), ("held_out", texts.held_out)):
            streams[split] = corpus.encode(tokenizer, documents, seed)
            facts[f"{split}_files"] = len(documents)
            facts[f"{split}_bytes"] = sum(len(text.encode()) for text in documents)
            facts[f"{split}_tokens"] = len(streams[split].tokens)
        raw = {split: (stream.tokens, stream.starts) for split, stream in streams.items()}
        torch.save({"streams": raw, "facts": facts, "seed": seed}, corpus_file.with_suffix(".new"))
        os.replace(corpus_file.with_suffix(".new"), corpus_file)
    saved = torch.load(corpus_file, weights_only=True)
    if saved["seed"] != seed:
        raise TrainError(
            f"{work} was started with --seed {saved['seed']}. Use that seed, or another --work"
        )
    facts = saved["facts"]
    log(f"corpus: {facts['train_files']} files, {facts['train_tokens']:,} tokens to train on")
    streams = {split: corpus.TokenStream(*raw) for split, raw in saved["streams"].items()}
    return PreTrainedTokenizerFast.from_pretrained(work / "tokenizer"), streams, facts


def sampled_text(
    target: LlamaForCausalLM, stream: corpus.TokenStream, count: int, seed: int, work: Path
) -> torch.Tensor:
    """Windows int64 [count, SAMPLED_LENGTH] of the target's own text, as the draft will meet it.

    Every window starts with 4 to 32 tokens of the corpus. Of eight windows, five are sampled at
    temperature 1, two at 0.7, and one greedily.
    """
    path = work / "sampled.pt"
    if path.exists():
        return torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.7, 0.0])
    parts = []
    while sum(map(len, parts)) < count:
        rows = min(128, count)
        prompts = corpus.windows(stream, rows, 4 << len(parts) % 4, generator)
        row_temperatures = temperatures.repeat(-(-rows // len(temperatures)))[:rows]
        with autocast():
            parts.append(
                measure.sample(target, prompts, SAMPLED_LENGTH, row_temperatures, generator)
            )
        log(f"sampled: {sum(map(len, parts))} of {count} windows")
    sampled = torch.cat(parts)[:count]
    torch.save(sampled, path)
    return sampled


def batches_from(stream: corpus.TokenStream, sampled: torch.Tensor | None = None) -> Batches:
    """Random windows of the corpus; half of those of SAMPLED_LENGTH from `sampled`, if given."""

    def draw(length: int, generator: torch.Generator) -> torch.Tensor:
        count = BATCH_TOKENS // length
        use_sampled = float(torch.rand((), generator=generator)) < 0.5
        if sampled is not None and use_sampled and length == SAMPLED_LENGTH:
            return sampled[torch.randint(0, len(sampled), (count,), generator=generator)]
        return corpus.windows(stream, count, length, generator)

    return draw


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write float16 weights, configurations and tokenizer in the Hugging Face layout."""
    half_model = LlamaForCausalLM(model.config).to(torch.float16)
    half_model.load_state_dict(model.state_dict())
    half_model.config.dtype = torch.float16
    half_model.config.pad_token_id = corpus.SEPARATOR_ID
    half_model.config.architectures = ["LlamaForCausalLM"]
    half_model.generation_config = GenerationConfig(
        bos_token_id=corpus.SEPARATOR_ID,
        eos_token_id=corpus.SEPARATOR_ID,
        pad_token_id=corpus.SEPARATOR_ID,
    )
    folder.mkdir(parents=True, exist_ok=True)
    half_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The class name that both Transformers 4 and 5 load.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for local_setting in ("is_local", "local_files_only"):
        settings.pop(local_setting, None)
    path.write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)


def evaluate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, stream: corpus.TokenStream, plan: Plan
) -> dict[str, dict[str, float]]:
    """Figures on held-out text, and on the target's continuations of held-out prompts."""
    generator = torch.Generator().manual_seed(20)
    held_out = corpus.windows(stream, plan.held_out_windows, 512, generator)
    figures = {"held_out_text": measure.measure(target, draft, held_out)}
    prompts = corpus.windows(stream, plan.generated_windows, PROMPT_LENGTH, generator)
    for name, temperature in (("target_text_temperature_1", 1.0), ("target_text_greedy", 0.0)):
        temperatures = torch.full((len(prompts),), temperature)
        length = PROMPT_LENGTH + GENERATED_LENGTH
        text = measure.sample(target, prompts, length, temperatures, generator)
        figures[name] = measure.measure(target, draft, text, prompt=PROMPT_LENGTH)
    return {name: measure.report(value) for name, value in figures.items()}


def train(plan: Plan, seed: int, work: Path, out: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, streams, facts = prepare(plan, seed, work)
    text = streams["train"]

    target = new_model(TARGET_SHAPE, seed)
    card: dict[str, object] = {"seed": seed, "corpus": facts}
    card["target"] = Trainer(
        "target", target, next_token_loss(target), batches_from(text), TARGET_RATE,
        plan.minutes_target, plan.steps_target, seed, work, plan.compiled,
    ).run()  # fmt: skip
    target = plain_copy(target, TARGET_SHAPE)

    sampled = sampled_text(target, text, plan.sampled_windows, seed, work)
    teacher = plain_copy(target, TARGET_SHAPE)
    draft = new_model(DRAFT_SHAPE, seed + 1)
    card["draft"] = Trainer(
        "draft", draft, distillation_loss(draft, teacher, plan.compiled),
        batches_from(text, sampled), DRAFT_RATE,
        plan.minutes_draft, plan.steps_draft, seed + 1, work, plan.compiled,
    ).run()  # fmt: skip
    draft = plain_copy(draft, DRAFT_SHAPE)

    for name, model in (("target", target), ("draft", draft)):
        save(model, tokenizer, out / name)
    log("evaluating the saved models")
    saved_target = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    saved_draft = LlamaForCausalLM.from_pretrained(out / "draft", dtype=torch.float32)
    card["saved"] = evaluate(saved_target, saved_draft, streams["held_out"], plan)
    (out / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    for name, figures in card["saved"].items():
        log(f"{name}: " + "  ".join(f"{key} {value}" for key, value in figures.items()))
    prompt = tokenizer("def read_file(path):\n", return_tensors="pt")["input_ids"]
    greedy = measure.sample(saved_target, prompt, 96, torch.zeros(1), torch.Generator())
    log(f"greedy sample:\n{tokenizer.decode(greedy[0])}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "outrider-train",
        help="folder for corpus and checkpoints, to continue from (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        help="output folder for target/, draft/ and training.json (default: this script's folder)",
    )
    add(
        "--minutes-target",
        type=float,
        default=50,
        metavar="M",
        help="training time of the target, converted to steps by timing the first ones (default: "
        "50)",
    )
    add(
        "--minutes-draft",
        type=float,
        default=15,
        metavar="M",
        help="training time of the draft (default: 15)",
    )
    add(
        "--steps-target",
        type=int,
        metavar="N",
        help="number of steps of the target, instead of minutes; may also shorten a run that is "
        "continued",
    )
    add("--steps-draft", type=int, metavar="N", help="number of steps of the draft, likewise")
    add("--seed", type=int, default=0, help="random seed for weights and data (default: 0)")
    add("--threads", type=int, help="number of CPU threads (default: PyTorch's)")
    add(
        "--compile",
        action="store_true",
        help="compile the layers for training: about twice as fast; needs a C++ compiler",
    )
    add(
        "--smoke",
        action="store_true",
        help="test run: a few steps on little text; the result is kept only if --out is given",
    )
    return parser.parse_args()  # fmt: skip


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        if options.smoke:
            with tempfile.TemporaryDirectory() as folder:
                out = options.out or Path(folder) / "out"
                plan = replace(SMOKE, compiled=options.compile)
                train(plan, options.seed, Path(folder) / "work", out)
            return
        plan = Plan(
            options.minutes_target, options.minutes_draft,
            options.steps_target, options.steps_draft, options.compile,
        )  # fmt: skip
        train(plan, options.seed, options.work, options.out or Path(__file__).parent)
    except (TrainError, OSError) as problem:
        remedy = ". Check space and permissions there" if isinstance(problem, OSError) else ""
        sys.exit(f"error: {problem}{remedy}")
    except KeyboardInterrupt:
        sys.exit("stopped. The same command continues from the last checkpoint")


if __name__ == "__main__":
    main()
