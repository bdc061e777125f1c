"""The timestamp rule, and the segments of a window's tokens, are those of Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from runtime.audio.timestamps import TimedTokens, TimestampRule, split_window

# A vocabulary in Whisper's order: text, its end, special tokens, no-timestamps, timestamps.
END, NO_TIMES, VOCAB_SIZE = 4, 6, 12
ZERO = NO_TIMES + 1
PROMPT = [5, 8, 5]  # one of them is a timestamp token


def theirs(scores: np.ndarray, output: tuple[int, ...], latest: int | None) -> np.ndarray:
    config = GenerationConfig(eos_token_id=END, no_timestamps_token_id=NO_TIMES)
    config.max_initial_timestamp_index = latest
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    text = torch.tensor([[*PROMPT, *output]])
    return processor(text, torch.from_numpy(scores)[None])[0].numpy()


def ours(scores: np.ndarray, output: tuple[int, ...], latest: int | None) -> np.ndarray:
    found = scores.copy()
    text = np.array([*PROMPT, *output])
    TimestampRule(NO_TIMES, END, latest)(found, text, len(PROMPT))
    return found


def outputs() -> Iterator[tuple[int, ...]]:
    """All outputs of up to three tokens, and random longer ones."""
    tokens = [0, 3, *range(ZERO, VOCAB_SIZE)]
    for length in range(4):
        yield from product(tokens, repeat=length)
    rng = np.random.default_rng(0)
    for length in rng.integers(4, 12, 200):
        yield tuple(rng.choice(tokens, length).tolist())


@pytest.mark.parametrize("latest", [None, 0, 2])
def test_the_rule_is_that_of_transformers(latest: int | None) -> None:
    rng = np.random.default_rng(1)
    kinds = set()
    for output in outputs():
        scores = (2 * rng.standard_normal(VOCAB_SIZE)).astype(np.float32)
        scores[rng.random(VOCAB_SIZE) < 0.1] = -np.inf  # tokens suppressed before
        found = ours(scores, output, latest)
        np.testing.assert_array_equal(found, theirs(scores, output, latest), str(output))
        again = ours(found, output, latest)
        np.testing.assert_array_equal(again, found, "a row may be processed twice")
        left = np.isfinite(found)
        kinds.add((left[:ZERO].any(), left[ZERO:].any()))
    assert {(True, True), (True, False), (False, True)} <= kinds


def their_cut(
    tokens: list[int], zero: int, seek: int, frames: int
) -> tuple[list[TimedTokens], int]:
    segments, further = WhisperForConditionalGeneration._retrieve_segment(
        seek_sequence=torch.tensor(tokens, dtype=torch.long),
        seek_outputs=[{}],
        time_offset=torch.tensor([seek], dtype=torch.float64) * 0.02 / 2,
        timestamp_begin=zero,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.tensor([PROMPT]),
    )
    cuts = [TimedTokens(float(s["start"]), float(s["end"]), s["tokens"].tolist()) for s in segments]
    return cuts, int(further)


def test_segments_are_those_of_transformers() -> None:
    rng = np.random.default_rng(2)
    kinds = set()
    for _ in range(2000):
        count = rng.integers(0, 14)
        tokens = np.where(
            rng.random(count) < 0.45, ZERO + rng.integers(0, 1501, count), rng.integers(0, 3, count)
        ).tolist()
        seek, frames = int(rng.integers(0, 100_000)), int(rng.integers(1, 3001))
        found = split_window(tokens, zero=ZERO, seek=seek, frames=frames, seconds=160 / 16_000)
        expected = their_cut(tokens, ZERO, seek, frames)
        if not any(token > ZERO for token in tokens):  # the window's end, rounded to float32
            assert -1e-9 < found[0][0].end - expected[0][0].end < 0.02 + 1e-9
            expected[0][0] = replace(expected[0][0], end=found[0][0].end)
        assert found == (expected[0], expected[1] or frames), tokens
        kinds.add((len(found[0]) > 1, found[1] == frames))
    assert len(kinds) == 4


def test_every_window_leads_on() -> None:
    """Fault: Transformers transcribes the same window again and again."""
    tokens = [ZERO, ZERO, 0]
    assert their_cut(tokens, ZERO, 10, 3000)[1] == 0
    assert split_window(tokens, zero=ZERO, seek=10, frames=3000, seconds=0.01)[1] == 3000
