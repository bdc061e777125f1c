"""The sampling of a round as one node of the target's graph: `outrider::Verify`.

The node calls an ONNX model-local function whose body implements the token rule of
runtime/sampling/rules.py in standard operators, so any backend that has those can run it. TensorRT
has a plugin of the same name, the kernel of plugins/, and uses it instead of the body
(docs/tensorrt.md).

Random numbers are generated inside the graph, by Philox on int64. Its inputs are a seed and a
position, as for the kernel, so no other component draws random numbers for it. The rule itself is a
separate function, `Judge`, which takes the uniforms, so that tests can enumerate it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from runtime.files.errors import OutriderError

from ..weights.operators import initializer
from .own import DOMAIN, add_functions
from .sampling import functions

ALL_TOKENS = 2**31 - 1  # vocab_size: as many tokens as there are logits


def append_verify(model: ir.Model, vocab_size: int) -> None:
    """Add the verification of a round to the target's graph, in place.

    The graph is one of export/graph.py: a call over [pending, x1 .. xgamma] with logits at all of
    them. So the drafts are `input_ids` without the first, and the round starts at `position` + 1.
    New inputs: draft_logits [B, gamma, V'] of the logits' type; seed, gamma int64 [B];
    temperature, lenience float32 [B]. New outputs: accepted int32, token int64, status int32, [B].
    See `functions`. vocab_size: the number of tokens; logits beyond it are padding.
    Raises OutriderError "option" if the graph lacks these tensors, has fewer logits than
    vocab_size, or already contains the node.
    """
    graph = model.graph
    graph_values = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    for name in ("input_ids", "position", "logits"):
        if name not in graph_values:
            raise OutriderError(
                "option", f"the graph has no {name}", "Give a graph that python -m export wrote."
            )
    logits = graph_values["logits"]
    assert logits.shape is not None
    width = logits.shape[-1]
    if vocab_size != ALL_TOKENS and isinstance(width, int) and vocab_size > width:
        raise OutriderError(
            "option", f"vocab_size {vocab_size} exceeds the {width} logits", "Leave it out."
        )
    if "accepted" in graph_values:
        raise OutriderError("option", "the graph already has the Verify node", "Use it as it is.")
    assert graph_values["position"].shape is not None
    slots = graph_values["position"].shape[0]

    def value(name: str, dtype: ir.DataType, *shape: int | ir.SymbolicDim | str) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([slots, *shape]))

    assert logits.dtype is not None
    new_inputs = {
        "draft_logits": value("draft_logits", logits.dtype, "drafts", "draft_vocabulary"),
        "seed": value("seed", ir.DataType.INT64),
        "gamma": value("gamma", ir.DataType.INT64),
        "temperature": value("temperature", ir.DataType.FLOAT),
        "lenience": value("lenience", ir.DataType.FLOAT),
    }
    tensors = {n: ir.tensor(np.array([n]), name=f"outrider_{n}") for n in (1, ALL_TOKENS)}
    numbers = {n: initializer(model, tensor) for n, tensor in tensors.items()}
    drafts = ir.node(
        "Slice", [graph_values["input_ids"], numbers[1], numbers[ALL_TOKENS], numbers[1]]
    )
    start = ir.node("Add", [graph_values["position"], numbers[1]])
    new_outputs = [
        value("accepted", ir.DataType.INT32),
        value("token", ir.DataType.INT64),
        value("status", ir.DataType.INT32),
    ]
    verify = ir.node(
        "Verify",
        [
            logits, new_inputs["draft_logits"], drafts.outputs[0], new_inputs["seed"],
            start.outputs[0], new_inputs["gamma"], new_inputs["temperature"],
            new_inputs["lenience"],
        ],
        attributes={
            # On the node, not only as defaults: TensorRT's parser looks for them here.
            "plugin_namespace": DOMAIN, "plugin_version": "1", "rule": "token",
            "vocab_size": vocab_size,
        },
        domain=DOMAIN,
        outputs=new_outputs,
        name="outrider_verify",
    )  # fmt: skip
    graph.inputs.extend(new_inputs.values())
    graph.extend([drafts, start, verify])
    graph.outputs.extend(new_outputs)
    add_functions(model, functions())
