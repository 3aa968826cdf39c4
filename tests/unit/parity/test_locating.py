"""What the compute optimizer cuts is looked at in a run without it, and only where the runs part behind that."""

from __future__ import annotations

import onnx
import pytest

from ortlab.parity.parity import Parity
from ortlab.parity.parity_run import compared
from ortlab.render import text

EXPORTS_OF_A_COMPARISON = 2
"""The run that is looked at and its repetition each have one of their own."""


@pytest.fixture
def exports(monkeypatch):
    """Return the exports of ONNX Runtime, each with whether the compute optimizer was on."""
    from ortlab.engine.execution import Execution

    found = []
    original = Execution.export

    def noted(self, *args):
        found.append(self.options.compute_optimizer)
        return original(self, *args)

    monkeypatch.setattr(Execution, "export", noted)
    return found


@pytest.mark.row("I8")
@pytest.mark.parametrize(
    ("path", "factors", "phase", "seen"),
    [
        ("vit.layers.1.mlp.fc1", {"ahead": 1.001}, "forward", "classifier"),
        ("vit.layernorm", {"ahead": 1.001}, "forward", "classifier"),
        ("vit.layers.1.mlp.activation_fn", {"back": 1.001}, "backward", "vit.layers.1.mlp.fc1"),
    ],
)
def test_a_fault_among_cut_tensors_is_found_in_its_module(
    vit, lab_of, spoil_module, exports, path, factors, phase, seen
):
    model, batch = vit
    lab = lab_of(model, **batch)
    spoil_module(model.get_submodule(path), **factors)
    exports.clear()
    found = lab.parity(1, seeds=False, progress=False)
    assert (found.first.phase, found.first.module) == (phase, path)
    assert exports == [*[True] * EXPORTS_OF_A_COMPARISON, False]
    assert "found with the compute optimizer off: with it, " in found.first.reason
    assert found.first.reason.endswith(f"cannot be compared, and {seen} is the first that differs)")
    # What is sold is what the run with the user's switches gave: its tensors, and which of them cannot be compared.
    assert found.first.pair is next(pair for pair in found.pairs if pair.verdict == "differs")
    assert found.first.pair.site.module == seen
    cut = [pair for pair in found.not_compared if pair.note.startswith("shapes differ")]
    assert {pair.site.module for pair in cut} >= {"vit.layernorm", "vit.layers.1.mlp.fc2"}
    assert f"in {path} (" in text.render(found)
    assert Parity.from_dict(found.to_dict()).first.reason == found.first.reason
    assert lab.options.compute_optimizer
    assert lab.rerun(progress=False).losses == lab.runs.run(1).losses


@pytest.mark.parametrize(
    ("path", "factors"),
    [(None, {}), ("vit.layers.0.mlp.fc1", {"ahead": 1.001}), ("classifier", {"back": 1.001})],
)
def test_where_nothing_is_hidden_nothing_more_is_run(vit, lab_of, spoil_module, exports, path, factors):
    model, batch = vit
    lab = lab_of(model, **batch)
    if path:
        spoil_module(model.get_submodule(path), **factors)
    exports.clear()
    found = lab.parity(1, seeds=False, progress=False)
    assert (found.first.module if found.first else None) == path
    assert exports == [True] * EXPORTS_OF_A_COMPARISON


@pytest.mark.row("I8")
def test_with_the_compute_optimizer_off_one_look_is_enough(vit, lab_of, spoil_module, exports):
    model, batch = vit
    lab = lab_of(model, **batch)
    lab.set(compute_optimizer=False)
    spoil_module(model.vit.layers[1].mlp.fc1, ahead=1.001)
    exports.clear()
    found = lab.parity(1, seeds=False, progress=False)
    assert found.first.module == "vit.layers.1.mlp.fc1"
    assert found.first.pair.site.module == "vit.layers.1.mlp.fc1"
    assert exports == [False] * EXPORTS_OF_A_COMPARISON


def is_moved(graph):
    """Tell whether what the classifier takes has been cut before the last norm, not right before the classifier."""
    (head,) = (node for node in graph.node if node.name.endswith("/classifier/Gemm"))
    (producer,) = (node for node in graph.node if head.input[0] in node.output)
    return producer.op_type == "LayerNormalization"


def multiply_logits(graph):
    (node,) = (node for node in graph.node if node.name.endswith("/classifier/Gemm"))
    result, node.output[0] = node.output[0], "logits_before"
    graph.value_info.append(onnx.helper.make_tensor_value_info("logits_before", onnx.TensorProto.FLOAT, None))
    factor = onnx.helper.make_tensor("factor", onnx.TensorProto.FLOAT, [], [1.001])
    place = [*graph.node].index(node) + 1
    graph.node.insert(
        place, onnx.helper.make_node("Mul", ["logits_before", "factor"], [result], name="faulty")
    )
    graph.node.insert(place, onnx.helper.make_node("Constant", [], ["factor"], name="factor", value=factor))


@pytest.mark.row("I8")
def test_a_fault_that_only_the_moved_graph_has_is_said_to_be_the_optimizers(vit, lab_of):
    model, batch = vit
    lab = lab_of(model, **batch)
    moved = []

    def edit(graph_model):
        moved.append(is_moved(graph_model.graph))
        if moved[-1]:
            multiply_logits(graph_model.graph)

    found = compared(lab._bench, 1, dropout=False, seeds=False, progress=False, edit=edit)
    assert moved == [True, True, True, False]  # looked at, repeated, not looked at; not optimised
    assert (found.first.module, found.first.pair.site.module) == ("classifier", "classifier")
    assert "with the compute optimizer off this tensor agrees" in found.first.reason
    assert "lab.set(compute_optimizer=False) avoids it" in found.first.reason
    assert "vit.layernorm" in found.first.others
    lab.set(compute_optimizer=False)
    assert compared(lab._bench, 1, dropout=False, seeds=False, progress=False, edit=edit).ok


def test_where_it_cannot_run_without_the_optimizer_the_first_look_stands_and_is_said_to(vit, lab_of):
    model, batch = vit
    lab = lab_of(model, **batch)

    def edit(graph_model):
        if is_moved(graph_model.graph):
            multiply_logits(graph_model.graph)
        else:
            graph_model.graph.node[0].op_type = "NoSuchOperator"

    found = compared(lab._bench, 1, dropout=False, seeds=False, progress=False, edit=edit)
    assert found.first.module == "classifier"
    assert "vit.layernorm" in found.first.others
    assert found.first.reason == "what it takes agrees, what it returns does not"
    (note,) = (note for note in found.notes if "a run without it failed" in note)
    assert note.startswith("The compute optimizer cuts tensors where the runs part")
    assert lab.options.compute_optimizer
    assert lab.status.state == "ready"
