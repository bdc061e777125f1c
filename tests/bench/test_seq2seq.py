"""Encoder-decoders in the side-by-side benchmark: pairs with known output, and the systems that
read sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rounds import cases
from test_core import render_page
from test_side import FakeContext
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from bench.core import pair as pairs
from bench.core.clock import Clock
from bench.core.costs import row_bytes
from bench.core.pair import SEQ2SEQ, Pair, Seq2SeqShape, seq2seq
from bench.suites.side import run as measuring
from bench.suites.side.run import MEASURED, PLAIN, SideRun, systems
from bench.suites.side.seq2seq import PIECE, Seq2SeqScale, jobs, make_source
from bench.suites.side.suite import SUITE, run
from bench.systems import SYSTEMS
from bench.systems.peer import Peer
from bench.systems.protocol import Request, StepsRequest, Text, Unavailable
from bench.systems.worker import step_share

SIZES = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
AUDIO = {**SIZES, "decoder_attention_heads": 4, "decoder_ffn_dim": 128}
TINY = {
    "t5-tiny": Seq2SeqShape(
        "T5Config", {"vocab_size": 4200, "d_kv": 16},
        {"d_model": 96, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4}, False, (1,),
    ),
    "whisper-tiny": Seq2SeqShape(
        "WhisperConfig", {"vocab_size": 4200, "num_mel_bins": 80},
        {**AUDIO, "decoder_layers": 2}, {**AUDIO, "decoder_layers": 1}, True, (4197, 4199),
    ),
}  # fmt: skip
SCALE = Seq2SeqScale(2, (96, 24), (30, 24), 24)


@pytest.fixture(scope="module", params=cases(["t5-tiny"], TINY))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SEQ2SEQ, request.param, TINY[request.param])
        return pairs.make(request.param, 0.8, tmp_path_factory.mktemp("pairs"))


def load(folder: Path, shape: Seq2SeqShape) -> Any:
    kind = AutoModelForSpeechSeq2Seq if shape.is_audio else AutoModelForSeq2SeqLM
    return kind.from_pretrained(folder)


def source(shape: Seq2SeqShape, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    if shape.is_audio:
        return rng.standard_normal((80, 3000), np.float32)
    return rng.integers(1, 4000, 40).tolist()


def logits(model: Any, shape: Seq2SeqShape, ids: torch.Tensor) -> torch.Tensor:
    given = torch.tensor(source(shape))[None]
    with torch.no_grad():
        return model(**{model.main_input_name: given}, decoder_input_ids=ids[None]).logits[0]


def test_a_pair_says_what_is_known_and_agrees_as_often_as_asked(pair: Pair) -> None:
    """The formula is compared with the full models, source and layers included, in Transformers."""
    shape = TINY[pair.shape]
    ids = torch.randint(1, 4100, (200,), generator=torch.Generator().manual_seed(3))
    p, q = (logits(load(folder, shape), shape, ids) for folder in (pair.target, pair.draft))
    known = [seq2seq.greedy_output(shape, pair.target, int(token), 1)[0] for token in ids[:40]]
    assert (p[:40].argmax(-1) == torch.tensor(known)).sum() >= 39  # a tie may be broken differently
    assert len(set(known)) > 30
    p, q = p.softmax(-1), q.softmax(-1)
    assert abs(float(torch.minimum(p, q).sum(-1).mean()) - 0.8) < 0.06
    assert float(p[:, seq2seq.END_OF_TEXT].max()) < 1e-4
    if shape.is_audio:  # both share one encoder
        weights = (load(f, shape).get_encoder().state_dict() for f in (pair.target, pair.draft))
        one, other = weights
        assert all(torch.equal(one[name], other[name]) for name in one | other)


@pytest.mark.parametrize(
    ("name", "target", "draft"),
    # Counts of the published checkpoints; the draft of two layers has not been published.
    [("t5-base", 222_903_552, 60_506_624), ("whisper-small", 241_734_912, None)],
)
def test_the_named_shapes_have_as_many_parameters(
    name: str, target: int, draft: int | None
) -> None:
    shape = SEQ2SEQ[name]
    for sizes, expected in ((shape.target, target), (shape.draft, draft)):
        with torch.device("meta"):
            kind = AutoModelForSpeechSeq2Seq if shape.is_audio else AutoModelForSeq2SeqLM
            model = kind.from_config(seq2seq.configuration(shape, sizes))
        assert expected is None or model.num_parameters() == expected


def test_a_step_reads_the_matrices_that_it_multiplies_with(pair: Pair) -> None:
    """The matrices are those of modules that run for one more token, whatever their names."""
    shape = TINY[pair.shape]
    model = load(pair.target, shape)
    given = {model.main_input_name: torch.tensor(source(shape))[None]}
    run: dict[int, int] = {}
    with torch.no_grad():
        first = model(**given, decoder_input_ids=torch.tensor([[1]]), use_cache=True)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(
                    lambda m, *_: run.update({id(m.weight): m.weight.numel()})
                )
        hidden = (first.encoder_last_hidden_state,)
        cache = first.past_key_values
        model(encoder_outputs=hidden, past_key_values=cache, decoder_input_ids=torch.tensor([[2]]))
    matrices = sum(run.values())
    read = step_share(pair.target) * model.num_parameters()
    assert matrices < read < 1.1 * matrices  # norms and positions are the rest
    assert read < 0.95 * model.num_parameters()
    heads = model.config.decoder_attention_heads if shape.is_audio else model.config.num_heads
    assert row_bytes(pair.target, 4) == 2 * 2 * heads * 16 * 4


def test_what_is_read() -> None:
    output = list(range(5000, 5096))
    ids = make_source(np.random.default_rng(0), output, 400, 4000)
    text = " ".join(map(str, ids))
    found = [" ".join(map(str, output[i : i + PIECE])) in text for i in range(0, 96, PIECE)]
    assert len(ids) == 400 and found == [True, False] * 3
    assert max(make_source(np.random.default_rng(0), [], 30, 4000)) < 4000


def test_who_reads_sources() -> None:
    names = {system.name for system in systems(list(SYSTEMS), ["int8"], "seq2seq")}
    assert names == {"outrider int8 plain", "outrider int8 draft", "ctranslate2 int8 plain"}
    assert {"llama.cpp q4_0 plain"} < {s.name for s in systems(["llama.cpp"], ["int4"])}


class FakePeer(FakeContext):
    """Encodes in 0.1 s, then generates a token every 0.01 s (Transformers: every 0.04 s)."""

    facts: ClassVar[dict[str, Any]] = {
        "load_seconds": 0.5, "weights": 10**7, "draft_weights": 10, "cache_element": 4,
    }  # fmt: skip
    requests: ClassVar[list[Request]] = []

    def __init__(self, name: str, target: Path, **options: Any):
        self.step = {"outrider": 0.01, "transformers": 0.04, "ctranslate2": 0.01}[name]
        assert options["max_len"] == 448

    def generate(self, request: Request) -> list[Text]:
        self.requests.append(request)
        step = self.step / (2 if request.mode == "draft" else 1)
        times = [0.1 + step * (1 + i) for i in range(request.new_tokens)]
        ids = list(range(len(times)))
        return [Text(ids, times, [0.0] * len(times), notes={"encode": 0.1})]

    def time_steps(self, request: StepsRequest) -> Any:
        raise Unavailable("it only pretends")


def test_a_whole_run_of_sources_with_systems_that_only_pretend(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = pair.shape
    monkeypatch.setattr(measuring, "Peer", FakePeer)
    monkeypatch.setattr(FakePeer, "requests", [])
    monkeypatch.setitem(SEQ2SEQ, name, TINY[name])
    chosen = systems(list(SYSTEMS), ["float32"], "seq2seq")
    work = jobs(SCALE, pair, chosen, (0.0, 1.0))
    side = SideRun(pair, 1, tmp_path, Clock(), max_len=448, warm_ups=1)
    results = run(side, chosen, [work], None)
    assert {request.begin[:-1] for request in FakePeer.requests} == {TINY[name].begin}
    cells = results["cells"]
    assert [cell["temperature"] for cell in cells] == [0, 1] * (1 if TINY[name].is_audio else 2)
    row = cells[0]["rows"][0]
    rows = 1500 if TINY[name].is_audio else 96
    rows += len(TINY[name].begin) + 1 + 12  # and half of the output
    floor = 10**7 + rows * row_bytes(pair.target, 4)
    assert row[PLAIN]["bytes"] == 23 * floor
    assert row[PLAIN]["encode"] == 0.1 and row[PLAIN]["whole"] == pytest.approx(0.34)
    assert ("outrider lookup" in row) == (not TINY[name].is_audio)
    lines = render_page(SUITE, results).splitlines()
    assert any("| encoder ms | whole text ms |" in line for line in lines)
    assert (
        "| outrider draft, speed vs. outrider plain | at least 1.5 | 2.00 (2.00 to 2.00) | yes |"
        in lines
    )
    assert any(
        line.startswith("| encoder: outrider plain, speed vs. transformers") for line in lines
    )
    assert (
        "| outrider int8 draft, speed vs. outrider int8 plain | at least 1.5 |  | not measured |"
        in lines
    )


MODES = {name: modes for (name, bits), modes in MEASURED["seq2seq"].items() if bits == "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_systems_read_sources(pair: Pair, name: str, tmp_path: Path) -> None:
    if (reason := SYSTEMS[name].missing_reason()) is not None:
        pytest.skip(reason)
    shape = TINY[pair.shape]
    options: dict[str, Any] = {"threads": 1, "work": tmp_path, "max_len": 128}
    with Peer(name, pair.target, draft=pair.draft, **options) as peer:
        for number, mode in enumerate(MODES[name]):
            first = 200 + number
            begin = (*shape.begin, first)
            (text,) = peer.generate(Request([source(shape, number)], 16, mode, begin=begin))
            assert text.tokens == seq2seq.greedy_output(shape, pair.target, first, 16), mode
            assert ("encode" in text.notes) == (shape.is_audio or name != "ctranslate2")
            assert 0 < text.notes.get("encode", 1e-9) < text.times[0]
            draws = (Request([source(shape, 9 + i)], 16, mode, 1.0, 5, begin=begin) for i in (0, 1))
            drawn = [result.tokens for one in draws for result in peer.generate(one)]
            assert drawn[0] != text.tokens
        assert (
            0 < peer.facts["weights"] < 4 * pair.target.joinpath("model.safetensors").stat().st_size
        )
