"""The graph for one slot in ONNX Runtime's own operators: the same model, or it is not kept."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from checkpoints import MAX_LEN, VOCAB_SIZE, Workshop
from rounds import cases
from transformers import AutoModelForCausalLM

from export import compare, one_slot, part
from runtime.backends.onnxruntime import OrtEngine
from runtime.files.errors import OutriderError
from runtime.files.manifest import GRAPH_FILE, ONE_SLOT_FILE, read_pair

CAPACITY = MAX_LEN + 16  # rows of a slot, at least
# Plain; packed with biases; norms between; a window; a rotation of longer texts; learned positions.
LOWERED = cases(["llama", "qwen2", "qwen3", "mistral"], ["phi3", "opt"])
KEPT = {
    "gpt2": "products of flattened rows",
    "gemma2": "soft caps",
    "gpt-oss": "sinks",
    "deepseek3": "another width of values",
}


def nodes(folder: Path) -> Counter[str]:
    model = onnx.load(folder / "target" / ONE_SLOT_FILE, load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("name", LOWERED)
def test_attention_is_one_node(workshop: Workshop, name: str) -> None:
    folder = workshop.graphs(workshop.example(name))
    found = nodes(folder)
    assert found["GroupQueryAttention"] == len(read_pair(folder).target.key_shapes)
    assert not found.keys() & {"Attention", "TensorScatter", "RotaryEmbedding"}


def test_a_tied_output_matrix_is_not_transposed(workshop: Workshop) -> None:
    """Which would be done, in a copy, whenever the graph is opened."""
    folder = workshop.graphs(workshop.checkpoint("llama")) / "target"
    turned = {}
    for file in (GRAPH_FILE, ONE_SLOT_FILE):
        graph = onnx.load(folder / file, load_external_data=False).graph
        weights = {weight.name for weight in graph.initializer}
        turned[file] = [
            node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights
        ]
    assert turned[GRAPH_FILE] and not turned[ONE_SLOT_FILE]
    says_the_same(folder)


@pytest.mark.parametrize("name", cases(["gpt2", "gemma2"], KEPT))
def test_what_the_operator_cannot_do_has_no_such_graph(workshop: Workshop, name: str) -> None:
    folder = workshop.graphs(workshop.example(name))
    assert not (folder / "target" / ONE_SLOT_FILE).exists()
    assert ONE_SLOT_FILE not in read_pair(folder).target.files


def walk(engine: OrtEngine) -> npt.NDArray[np.float32]:
    """Logits of a prefill, rejected drafts, a step, and a call that ends with the slot."""
    rng = np.random.default_rng(0)
    found = []
    for position, width in (
        (0, 40),
        (40, 5),
        (38, 5),
        (43, 1),
        (44, 2),
        (engine.capacity - 30, 30),
    ):
        ids = rng.integers(0, engine.vocab_size, (1, width))
        index = np.arange(width)[-5:]
        found.append(engine.forward(ids, np.array([position]), index).copy())
    return np.concatenate(found, axis=1)


def says_the_same(folder: Path) -> None:
    """The two graphs of a model's folder."""
    facts = read_pair(folder.parent).target
    one, two = (walk(OrtEngine(folder, facts, slots=n, widest=5, threads=1)) for n in (1, 2))
    np.testing.assert_allclose(one, two, atol=2e-5 * (1 + np.abs(two).max()), rtol=0)


@pytest.mark.parametrize("name", LOWERED)
def test_one_slot_says_what_two_say(workshop: Workshop, name: str) -> None:
    says_the_same(workshop.graphs(workshop.example(name)) / "target")


def test_it_is_run_where_there_is_one_slot(workshop: Workshop, tmp_path: Path) -> None:
    source = workshop.graphs(workshop.checkpoint("llama"))
    facts = read_pair(source).target
    for slots, unused in ((1, GRAPH_FILE), (2, ONE_SLOT_FILE)):
        folder = tmp_path / f"{slots}"
        shutil.copytree(source / "target", folder)
        OrtEngine(folder, facts, slots=3 - slots, widest=1, threads=1)
        (folder / unused).unlink()
        OrtEngine(folder, facts, slots=slots, widest=1, threads=1)
        with pytest.raises(OutriderError):
            OrtEngine(folder, facts, slots=3 - slots, widest=1, threads=1)


def test_a_wrong_window_is_found_out(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: what is kept is what agrees with the original."""
    source = workshop.example("mistral")
    folder = Path(shutil.copytree(workshop.graphs(source) / "target", tmp_path / "target"))
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    original = compare.reference(model, CAPACITY, VOCAB_SIZE)
    assert "nodes, largest difference" in part._one_slot(folder, original, CAPACITY)
    assert (folder / ONE_SLOT_FILE).exists()
    monkeypatch.setattr(one_slot, "_window", lambda mask, queries: -1)
    assert "none: it would differ by" in part._one_slot(folder, original, CAPACITY)
    assert not (folder / ONE_SLOT_FILE).exists()


@pytest.mark.parametrize(
    ("rows", "window"),
    [("1000 1100 1110 1111", -1), ("1000 1100 0110 0011", 2), ("1000 0100 0010 0001", 1)],
)
def test_windows_are_read_off_masks(rows: str, window: int) -> None:
    mask = np.array([[c == "1" for c in row] for row in rows.split()])
    assert one_slot._window(mask, np.arange(4)) == window


@pytest.mark.parametrize("rows", ["1000 1100 0010 0011", "1111 1111 1111 1111"])
def test_other_masks_are_left_to_the_other_graph(rows: str) -> None:
    mask = np.array([[c == "1" for c in row] for row in rows.split()])
    with pytest.raises(one_slot.NotLowered):
        one_slot._window(mask, np.arange(4))
