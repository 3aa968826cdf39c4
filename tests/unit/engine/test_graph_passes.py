"""Each pass leaves a graph that computes the same, in the form whose gradient is right."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, shape_inference
from small_transformers import bert
from torch import nn

from ortlab.engine.passes import graph_passes, isolation

FLOAT = TensorProto.FLOAT


def model(nodes, inputs, outputs=("y",), constants=None):
    """A model of float inputs, and of boolean ones whose name starts with "is"."""
    graph_inputs = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if name.startswith("is") else FLOAT, shape)
        for name, shape in inputs.items()
    ]
    graph_outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    initializers = [
        onnx.numpy_helper.from_array(np.array(value), name) for name, value in (constants or {}).items()
    ]
    graph = helper.make_graph(nodes, "graph", graph_inputs, graph_outputs, initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return shape_inference.infer_shapes(made)


def run(made, feeds):
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def arrays(inputs):
    generator = np.random.default_rng(0)
    return {
        name: np.asarray(generator.random(shape) > 0.5)
        if name.startswith("is")
        else np.asarray(generator.standard_normal(shape, np.float32))
        for name, shape in inputs.items()
    }


def kinds(made):
    return [node.op_type for node in made.graph.node]


SHAPES = [(), (4,), (3, 1), (3, 4), (2, 1, 1)]


@pytest.mark.parametrize("condition", SHAPES, ids=str)
@pytest.mark.parametrize("yes", SHAPES, ids=str)
@pytest.mark.parametrize("no", SHAPES, ids=str)
def test_where_is_expanded_to_the_shape_of_its_output(condition, yes, no):
    inputs = {"is": condition, "yes": yes, "no": no}
    made = model([helper.make_node("Where", ["is", "yes", "no"], ["y"])], inputs)
    feeds = arrays(inputs)
    (expected,) = run(made, feeds)
    changed = graph_passes.broadcast_where(made)
    if changed is False:
        assert yes == no == expected.shape
    where = next(node for node in made.graph.node if node.op_type == "Where")
    for branch in where.input[1:]:
        made.graph.output.append(helper.make_tensor_value_info(branch, FLOAT, None))
    actual, *branches = run(made, feeds)
    np.testing.assert_array_equal(actual, expected)
    assert all(branch.shape == expected.shape for branch in branches)


def test_a_where_of_constants_is_left_alone():
    constants = {"a": np.float32(1), "b": np.float32(2)}
    made = model([helper.make_node("Where", ["is", "a", "b"], ["y"])], {"is": (3,)}, constants=constants)
    assert not graph_passes.broadcast_where(made)
    assert kinds(made) == ["Where"]


@pytest.mark.parametrize("inputs", [["x"], ["x", "ratio"], ["x", "", "training"]], ids=len)
def test_dropout_gets_its_mode_and_its_mask(inputs):
    constants = {"ratio": np.float32(0.5), "training": True}
    made = model([helper.make_node("Dropout", inputs, ["y"])], {"x": (200,)}, constants=constants)
    assert graph_passes.complete_dropouts(made)
    dropout = made.graph.node[-1]
    assert [len(dropout.input), len(dropout.output)] == [3, 2]
    (y,) = run(made, {"x": np.ones(200, np.float32)})
    assert 0 < (y == 0).sum() < 200
    assert not graph_passes.complete_dropouts(made)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("axis", [1, -1])
def test_a_partly_used_split_becomes_slices(used, axis):
    split = helper.make_node("Split", ["x", "sizes"], ["a", "b", "c"], axis=axis)
    outputs = ["abc"[index] for index in used]
    made = model([split], {"x": (2, 6)}, outputs, {"sizes": np.array([1, 3, 2])})
    feeds = arrays({"x": (2, 6)})
    expected = run(made, feeds)
    assert graph_passes.slice_partly_used_splits(made)
    assert "Split" not in kinds(made)
    assert kinds(made).count("Slice") == len(used)
    for left, right in zip(expected, run(made, feeds), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_split_that_is_used_throughout_stays():
    split = helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=0)
    made = model([split], {"x": (4,)}, ("a", "b"), {"sizes": np.array([1, 3])})
    assert not graph_passes.slice_partly_used_splits(made)


@pytest.mark.parametrize(("left", "right"), [((4,), (4, 3)), ((3, 4), (4,)), ((4,), (4,)), ((2, 3, 4), (4,))])
def test_vectors_in_products_become_matrices(left, right):
    inputs = {"left": left, "right": right}
    made = model([helper.make_node("MatMul", ["left", "right"], ["y"])], inputs)
    feeds = arrays(inputs)
    (expected,) = run(made, feeds)
    assert graph_passes.lift_vector_products(made)
    (actual,) = run(made, feeds)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    inferred = onnx.shape_inference.infer_shapes(made)
    assert not graph_passes.lift_vector_products(inferred)


@pytest.mark.parametrize("operator", ["ReduceL2", "ReduceLogSumExp"])
@pytest.mark.parametrize("axes", [None, [0], [-1], [0, 2]])
def test_reductions_keep_their_dimensions_first(operator, axes):
    attributes = {} if axes is None else {"axes": axes}
    made = model([helper.make_node(operator, ["x"], ["y"], keepdims=0, **attributes)], {"x": (2, 3, 4)})
    feeds = arrays({"x": (2, 3, 4)})
    (expected,) = run(made, feeds)
    assert graph_passes.keep_reduced_dimensions(made)
    (actual,) = run(made, feeds)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert not graph_passes.keep_reduced_dimensions(made)


@pytest.mark.parametrize(("cuda_build", "pairs"), [(True, 1), (False, 0)])
def test_two_quotients_are_not_joined_by_the_cuda_build(monkeypatch, cuda_build, pairs):
    """As DeBERTa adds them: the first to zero, the second to the sum."""
    monkeypatch.setattr(isolation, "provider", lambda: cuda_build)
    inputs = {"one": (2, 3), "other": (2, 3)}
    nodes = [
        helper.make_node("Div", ["one", "root"], ["first"]),
        helper.make_node("Div", ["other", "root"], ["second"]),
        helper.make_node("Add", ["first", "zero"], ["begun"]),
        helper.make_node("Add", ["begun", "second"], ["y"]),
        helper.make_node("Add", ["y", "one"], ["not of two quotients"]),
    ]
    constants = {"root": np.float32(3), "zero": np.float32(0)}
    made = model(nodes, inputs, constants=constants)
    feeds = arrays(inputs)
    before = run(made, feeds)
    assert isolation.isolate_quotients(made) is cuda_build
    assert kinds(made).count("Squeeze") == pairs
    np.testing.assert_array_equal(run(made, feeds), before)


def test_installing_twice_is_once(ortmodule):
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    before = GraphTransitionManager._infer_shapes
    graph_passes.install()
    assert GraphTransitionManager._infer_shapes is before


def test_a_buffer_that_is_cut_to_the_batch_has_the_dimension_of_the_batch(wrap):
    """Left open, the shapes of everything behind it would be unknown, and gradients sum at run time."""
    module, ids = bert("Model", layers=1, width=8, words=20), torch.randint(1, 20, (2, 5))
    lab = wrap(module)
    module(input_ids=ids).last_hidden_state.sum().backward()
    values = lab.graph("processed").model.graph.value_info
    (normal,) = (
        one for one in values if one.name.endswith("embeddings/LayerNorm/LayerNormalization_output_0")
    )
    assert [size.dim_param for size in normal.type.tensor_type.shape.dim][:2] == [
        "input_ids_dim0",
        "input_ids_dim1",
    ]


def inferred(made):
    """The dimensions of every result, as the processing of an export infers them."""
    from onnxruntime.training.ortmodule import _graph_transition_manager as transitions

    graph = transitions.SymbolicShapeInference.infer_shapes(
        made, auto_merge=True, guess_output_rank=False
    ).graph
    return {
        value.name: [size.dim_value or size.dim_param for size in value.type.tensor_type.shape.dim]
        for value in graph.value_info
    }


def test_dimensions_that_meet_get_the_name_of_the_first_input(ortmodule):
    """ORT's own takes any: the shapes of a model, and whether it could be built, depended on PYTHONHASHSEED."""
    names = ["e", "b", "d", "a", "c"]
    nodes = [
        helper.make_node("Add", [left, right], [f"{left}{right}"], name=f"{left}{right}")
        for left, right in (("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "abcd"))
    ]
    made = model(nodes, {name: [f"{name}_rows", 4] for name in names}, ["eabcd"])
    shapes = inferred(made)
    assert shapes["abcd"] == shapes["ab"] == shapes["cd"] == ["e_rows", 4]


def test_what_was_inferred_before_two_dimensions_met_is_inferred_again(ortmodule):
    """The size that a Reshape computes would stay a quotient of both, and all behind it without a shape."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "turned"], ["scores"]),
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("MatMul", ["masked", "x"], ["mixed"]),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["length"]),
        helper.make_node("Concat", ["keep", "length", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["mixed", "wanted"], ["shaped"]),
        helper.make_node("Add", ["shaped", "x"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    for index, node in enumerate(nodes):
        node.name = f"node_{index}"
    constants = {name: np.array([value], np.int64) for name, value in (("one", 1), ("keep", 0), ("rest", -1))}
    made = model(nodes, {"mask": ["n", "m", "m"], "x": ["n", "l", 16]}, constants=constants)
    assert inferred(made)["sum"] == ["n", "m", 16]


@pytest.mark.parametrize("operator", ["Mul", "MatMul", "Expand"])
def test_shapes_with_dimensions_that_may_be_one_are_forgotten(operator):
    """The gradient would not be summed over them: one head of DeepSeek's keys that is expanded to all."""
    shapes = {"one": ["heads", 4, 4], "all": ["more_heads", 4, 4]}
    second = "wanted" if operator == "Expand" else "all"
    made = model(
        [
            helper.make_node("Relu", ["x"], ["one"]),
            helper.make_node("Relu", ["z"], ["all"]),
            helper.make_node(operator, ["one", second], ["y"]),
        ],
        {"x": ["n", 4, 4], "z": ["n", 4, 4], "wanted": [3]},
    )
    shapes["y"] = shapes["all"]
    made.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()
    )
    graph_passes.forget_unlike_shapes(made)
    known = {value.name for value in made.graph.value_info if value.type.tensor_type.HasField("shape")}
    assert "one" not in known


def test_a_cast_to_the_type_that_is_there_is_none_nor_is_one_value_joined():
    nodes = [
        helper.make_node("Concat", ["x"], ["joined"], axis=0),
        helper.make_node("Cast", ["joined"], ["same"], to=FLOAT),
        helper.make_node("Cast", ["x"], ["other"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["other"], ["back"], to=FLOAT),
        helper.make_node("Mul", ["same", "same"], ["square"]),
        helper.make_node("Add", ["square", "back"], ["y"]),
    ]
    made = model(nodes, {"x": (2, 3)})
    feeds = arrays({"x": (2, 3)})
    before = run(made, feeds)
    graph_passes.forget_needless_nodes(made)
    assert kinds(made) == ["Identity", "Identity", "Cast", "Cast", "Mul", "Add"]
    np.testing.assert_array_equal(run(made, feeds), before)


class Twice(nn.Module):
    """Multiplies what a needless cast returns with itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x).float()
        return (hidden * hidden).sum()


def test_a_needless_cast_that_is_read_twice_is_built(wrap):
    lab = wrap(Twice())
    lab.module(torch.randn(2, 4)).backward()
    assert lab.status.executed_by == "ort"
