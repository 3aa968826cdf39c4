"""What is different between two graphs: the changes that ORT's switches make are named, and the same is the same."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import small_transformers
import torch
from torch import nn

import ortlab
from ortlab.errors import BuildError, LedgerError, OptionError, StepError
from ortlab.graphs.diff import GraphDiff, diff
from ortlab.graphs.stages import Graph
from ortlab.memory.recompute import COPY
from ortlab.options.options import setting_words
from ortlab.render import html, text


def stepped(model, *batch, **named):
    lab = ortlab.wrap(model)

    def step():
        found = model(*batch, **named)
        loss = found.loss if hasattr(found, "loss") else found.sum()
        loss.backward()
        return loss

    lab.step(step)
    return lab


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(2)
    model = small_transformers.bert(width=16, words=300, drop=0.1, max_position_embeddings=40)
    batch = small_transformers.batch_of(words=60, first=3, mask=True)
    lab = stepped(model, **batch)
    model.eval()
    with torch.no_grad():
        model(**batch)
    model.train()
    yield lab
    lab.unwrap()


@pytest.fixture(scope="module")
def roberta():
    torch.manual_seed(2)
    sizes = {"width": 16, "words": 60, "max_position_embeddings": 40}
    model = small_transformers.bert("ForSequenceClassification", family="Roberta", **sizes)
    ids = torch.randint(3, 60, (2, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
    lab = stepped(model, **batch)
    yield lab
    lab.unwrap()


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(8, 8), nn.Linear(8, 20), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.head(nn.functional.gelu(self.body(x))).view(-1, 20), y.view(-1))


@pytest.fixture(scope="module")
def sparse():
    torch.manual_seed(2)
    labels = torch.full((4, 8), -100)
    labels[:, :2] = 3
    lab = stepped(Loss(), torch.randn(4, 8, 8), labels)
    yield lab
    lab.unwrap()


@pytest.fixture(scope="module")
def custom(custom_layer):
    lab = stepped(custom_layer, torch.randn(3, 4))
    yield lab
    lab.unwrap()


LAYERS = "bert.encoder.layer.0 to 1"
HEAD = "cls.predictions.transform"

KNOWN = {
    "Gelu recomputed by a plan": (
        "bert",
        {"memory_plan": ("Gelu+:1:-1",)},
        "execution",
        f"Added 3 recompute nodes: 3 Gelu, in {LAYERS} and {HEAD}.transform_act_fn.",
    ),
    "gradients through the result of a layer norm": (
        "bert",
        {"memory_efficient_gradient": True},
        "gradient",
        (
            "Replaced 6 ortlab::layer_norm_backward by InvertibleLayerNormalizationGrad, in the backward, in "
            f"{LAYERS}, {HEAD}.LayerNorm and bert.embeddings.LayerNorm."
        ),
    ),
    "ORT's cross entropy": (
        "bert",
        {"aten_cross_entropy": False},
        "gradient",
        (
            "Replaced ortlab::cross_entropy and ortlab::cross_entropy_backward by SoftmaxCrossEntropyLossInternal and "
            "SoftmaxCrossEntropyLossInternalGrad."
        ),
    ),
    "ORT's softmax gradient": (
        "bert",
        {"aten_backward": False},
        "gradient",
        f"Replaced 2 ortlab::softmax_backward_over by SoftmaxGrad_13, in the backward, in {LAYERS}.",
    ),
    "casts put in": (
        "bert",
        {"cast_strategy": "INSERT_AND_REDUCE", "cast_level": 2},
        "optimized",
        "Put in 95 Cast.",
    ),
    "one token computed for the head": (
        "roberta",
        {"compute_optimizer": False},
        "optimized",
        (
            "Moved 1 Gather down past 11 nodes (5 Add, 3 MatMul, 2 LayerNormalization and Gelu), from 2 places, in "
            "classifier."
        ),
    ),
    "ignored labels left out": (
        "sparse",
        {"label_sparse_optimizer": False},
        "optimized",
        "Removed 2 ShrunkenGather, Sub, NonZero and Squeeze (5 nodes).",
    ),
    "a Function traced through": (
        "custom",
        {"custom_autograd": False},
        "gradient",
        "Replaced PythonOp and PythonOpGrad by 3 Mul and Add.",
    ),
}
"""Changes that a switch makes: the model, the switch, the graph, and a sentence that says it."""


@pytest.mark.row("B10", "D2", "D3", "D7", "F1", "C5")
@pytest.mark.parametrize("change", KNOWN)
def test_what_a_switch_does_to_the_graph_is_named(request, change):
    model, switches, stage, sentence = KNOWN[change]
    lab = request.getfixturevalue(model)
    found = lab.graph_diff(switches, stage=stage)
    assert sentence in found.sentences
    assert found.after.name == ", ".join(setting_words(name, value) for name, value in switches.items())


STAGES = {
    "shapes put together by the optimiser": (
        ("processed", "optimized", "training"),
        "Fused Unsqueeze and Concat into ConcatTraining, 3 times, in bert.embeddings and bert.",
    ),
    "transposes fused into products": (
        ("gradient", "execution", "training"),
        (
            f"Fused Transpose and MatMul into FusedMatMul, 14 times, in {LAYERS}, cls.predictions.decoder and "
            f"{HEAD}.dense."
        ),
    ),
    "bias and Gelu fused for inference": (
        ("gradient", "execution", "inference"),
        f"Fused 2 Add, 2 Mul, Div and Erf into BiasGelu, 3 times, in {LAYERS} and {HEAD}.transform_act_fn.",
    ),
    "layer norms computed by PyTorch for inference": (
        ("gradient", "execution", "inference"),
        (
            f"Replaced 6 LayerNormalization by ortlab::layer_norm, in {LAYERS}, bert.embeddings.LayerNorm and "
            f"{HEAD}.LayerNorm."
        ),
    ),
}
"""Changes that ORT makes from one stage to the next."""


@pytest.mark.row("B10")
@pytest.mark.parametrize("change", STAGES)
def test_what_a_stage_does_to_the_graph_is_named(bert, change):
    (before, after, mode), sentence = STAGES[change]
    found = diff(bert.graph(before, mode=mode), bert.graph(after, mode=mode))
    assert sentence in found.sentences
    if mode == "training":
        assert found == bert.graph_diff(before, after)


def test_onnxruntimes_own_fusion_of_residuals_is_named():
    model = small_transformers.bert(width=16, words=300).eval()
    lab = ortlab.wrap(model, aten_backward=False)
    with torch.no_grad():
        model(**small_transformers.batch_of(words=60, first=3))
    found = diff(*(lab.graph(stage, mode="inference") for stage in ("gradient", "execution")))
    fused = f"Fused Add and LayerNormalization into SkipLayerNormalization, 4 times, in {LAYERS}."
    assert fused in found.sentences


def test_dropout_is_what_training_adds(bert):
    graphs = [bert.graph("exported", mode=mode) for mode in ("inference", "training")]
    found = diff(*graphs)
    assert {node.operator for node in found.added} == {"Dropout"}
    assert len(found.added) == 7
    assert found.removed == found.moved == ()
    rewritten = [node.operator for one in found.rewritten for node in one.after]
    # PyTorch's kernel of the loss has a gradient that inference needs not; a GELU is one operator where it is trained.
    assert sorted(rewritten) == 3 * ["com.microsoft.Gelu"] + ["ortlab::cross_entropy"]
    assert (found.before.name, found.after.name) == ("exported for inference", "exported for training")


@pytest.mark.row("F1", "F20")
def test_a_memory_level_adds_copies_only(bert):
    found = bert.graph_diff(memory_level=1)
    names = [node.name for node in found.recomputed]
    assert found.sentences[0].startswith(f"Added {len(names)} recompute nodes: ")
    assert all(COPY in name for name in names)
    assert len(names) + len(found.added) == found.after.nodes - found.before.nodes
    assert len(found.matched) == found.before.nodes
    back = bert.graph_diff({"memory_level": 1}, {})
    assert back.sentences[0] == found.sentences[0].replace("Added", "Removed")


# --- the same ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["exported", "processed", "optimized", "gradient", "execution"])
def test_a_graph_and_itself_under_other_names_are_the_same(bert, stage):
    graph = bert.graph(stage)
    for other in (graph, renamed(graph, 1), renamed(graph, 2)):
        found = diff(graph, other)
        assert found.sentences == ()
        assert found.is_empty
        assert found.colours() == ({}, {})
    assert "No difference" in text.render(diff(graph, graph))


def test_a_change_is_found_under_other_names_too(roberta):
    before, after = roberta.graph("optimized"), renamed(built(roberta, compute_optimizer=False), 3)
    found = diff(before, after)
    (move,) = found.moved
    assert (move.before[0].operator, move.up, len(move.past)) == ("Gather", False, 11)


def built(lab, **changes):
    return lab.graph_diff({}, changes, stage="optimized").graphs[1]


def renamed(graph: Graph, seed: int) -> Graph:
    """Give nodes, results, constants and symbolic sizes other names, and the nodes another order."""
    model, draw = onnx.load_model_from_string(graph.serialized), random.Random(seed)
    kept = {one.name for one in (*model.graph.input, *model.graph.output)} | {""}
    names: dict[str, str] = {}

    def other(name):
        copied = COPY if name.endswith(COPY) else ""
        return (
            name if name in kept else names.setdefault(name, f"v{len(names)}_{draw.randrange(10**6)}{copied}")
        )

    for node in model.graph.node:
        node.name = f"n{draw.randrange(10**9)}{COPY if COPY in node.name else ''}"
        for values in (node.input, node.output):
            values[:] = [other(name) for name in values]
    for one in (*model.graph.initializer, *model.graph.value_info):
        one.name = other(one.name)
    for info in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        for size in info.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = f"{size.dim_param}_{seed}"
    nodes = shuffled(list(model.graph.node), draw)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return Graph(graph.stage, graph.mode, model.SerializeToString())


def shuffled(nodes, draw):
    """Put nodes into another order in which each comes after those that it reads from."""
    made = {name for node in nodes for name in node.output}
    done, ordered, waiting = set(), [], [copy.deepcopy(node) for node in nodes]
    while waiting:
        ready = [node for node in waiting if all(name in done or name not in made for name in node.input)]
        draw.shuffle(ready)
        for node in ready[: max(1, len(ready) // 2)]:
            ordered.append(node)
            done.update(node.output)
            waiting.remove(node)
    return ordered


CHILD = """
import sys, torch, ortlab
from torch import nn
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 3))
lab = ortlab.wrap(model)
model(torch.randn(5, 4)).sum().backward()
lab.graph("execution").save(sys.argv[1])
"""


def test_the_graph_that_another_process_builds_is_the_same(tmp_path):
    file = tmp_path / "other.onnx"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "77",
        "PYTHONPATH": str(Path(ortlab.__file__).parents[1]),
    }
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, str(file)],
        check=True,
        env=environment,
        capture_output=True,
    )
    names: dict[str, object] = {}
    exec(CHILD.replace("lab.graph", "#"), names)  # noqa: S102 - the same program, here
    assert diff(names["lab"].graph(), Graph("execution", "training", file.read_bytes())).is_empty
    names["lab"].unwrap()


# --- nothing is passed over -------------------------------------------------------------------------------------------


def swap_inputs(node, model):
    node.input[0], node.input[1] = node.input[1], node.input[0]


def drop_node(node, model):
    model.graph.node.remove(node)


def other_operator(node, model):
    node.op_type = "Max"


def other_attribute(node, model):
    node.attribute.append(onnx.helper.make_attribute("axis", 7))


def read_twice(node, model):
    node.input[1] = node.input[0]


@pytest.mark.parametrize("change", [swap_inputs, drop_node, other_operator, other_attribute, read_twice])
def test_a_change_of_any_node_is_seen(bert, change):
    graph = bert.graph("gradient")
    model = onnx.load_model_from_string(graph.serialized)
    places = [
        place
        for place, node in enumerate(model.graph.node)
        if node.op_type in ("Add", "Sub", "MatMul", "Gather") and len(set(node.input)) > 1
    ]
    for place in random.Random(4).sample(places, 8):
        other = copy.deepcopy(model)
        change(other.graph.node[place], other)
        assert not diff(graph, Graph("gradient", "training", other.SerializeToString())).is_empty


def test_outputs_in_each_others_place_are_seen(bert):
    graph = bert.graph("gradient")
    model = onnx.load_model_from_string(graph.serialized)
    yielded = next(node for node in model.graph.node if node.op_type == "YieldOp")
    yielded.input[0], yielded.input[1] = yielded.input[1], yielded.input[0]
    assert not diff(graph, Graph("gradient", "training", model.SerializeToString())).is_empty


def test_another_constant_is_seen_and_said(bert):
    graph = bert.graph("gradient")
    model = onnx.load_model_from_string(graph.serialized)
    (node, *_) = (one for one in model.graph.node if one.op_type == "Dropout")
    ratio = next(one for one in model.graph.initializer if one.name == node.input[1])
    added = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(ratio) * 0 + 0.75, "other_ratio")
    model.graph.initializer.append(added)
    node.input[1] = "other_ratio"
    found = diff(graph, Graph("gradient", "training", model.SerializeToString()))
    assert "Changed constant 1 of 1 Dropout from 0.1" in found.sentences[0]
    assert "to 0.75" in found.sentences[0]


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_record_is_json_in_and_out_and_has_table_and_colours(roberta, tmp_path):
    found = roberta.graph_diff(compute_optimizer=False)
    assert GraphDiff.load(found.save(tmp_path / "diff.json")) == found
    assert json.loads((tmp_path / "diff.json").read_text(encoding="utf-8"))["sentences"] == list(
        found.sentences
    )
    before, after = found.colours()
    names = [{node.name for node in graph.model.graph.node} for graph in found.graphs]
    assert before.keys() <= names[0]
    assert after.keys() <= names[1]
    assert "moved" in before.values()
    assert "changed" in after.values()
    table = found.table()
    assert set(table["difference"]) >= {"moved", "removed", "replaced", "changed"}
    shown = html.render(found)
    assert "Moved 1 Gather down past 11 nodes" in shown
    assert (
        shown.count("<img") == 1
    )  # the second graph, with what is different marked and what only the first has


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    file = tmp_path / "other.json"
    for content in ("{", "[]", "{}", '{"schema": 1}'):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(LedgerError):
            GraphDiff.load(file)


# --- the lab stays as it is -------------------------------------------------------------------------------------------


def standing(lab, experiment):
    digest = lab.graph().digest
    return (
        *experiment.state(),
        digest,
        lab._bench.configuration,
        lab.status,
        len(lab.runs),
        lab._bench.engine,
    )


def check_standing(before, after):
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_the_lab_is_as_it_was_and_builds_nothing_anew(lab, noisy_experiment, wrap):
    experiment = noisy_experiment
    lab = wrap(experiment.model)
    lab.step(experiment.step, 2)
    before = standing(lab, experiment)
    lab.graph_diff({"opset": 15}, {"memory_level": 1}, stage="exported")
    check_standing(before, standing(lab, experiment))
    run = lab.rerun(1)
    assert run.initialization is None


@pytest.mark.parametrize("raised", [ValueError("no more data"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_after_a_step_that_fails_the_lab_is_as_it_was(lab, experiment, raised):
    fails = []

    def step():
        loss = experiment.step()
        if fails:
            raise raised
        return loss

    lab.step(step, 2)
    before = standing(lab, experiment)
    fails.append(True)
    with pytest.raises(type(raised)):
        lab.graph_diff(opset=15)
    check_standing(before, standing(lab, experiment))
    fails.clear()
    assert lab.rerun(1).initialization is None


def test_a_build_that_fails_leaves_the_lab_as_it_was(lab, experiment, monkeypatch):
    lab.step(experiment.step)
    before = standing(lab, experiment)
    forward = type(experiment.model).hidden if hasattr(type(experiment.model), "hidden") else None
    assert forward is None
    monkeypatch.setattr(experiment.model.norm, "eps", 1e-3)  # an export of its own
    monkeypatch.setattr(
        nn.functional, "gelu", lambda _: (_ for _ in ()).throw(RuntimeError("no such operator"))
    )
    with pytest.raises((BuildError, RuntimeError)):
        lab.graph_diff(opset=15)
    monkeypatch.undo()
    check_standing(before, standing(lab, experiment))


def test_one_part_of_several_is_compared_and_the_count_of_calls_stays(experiment, wrap):
    lab = wrap(experiment.model, only=["hidden", "head"])
    lab.step(experiment.step)
    coverage = lab.status.coverage
    with pytest.raises(OptionError, match="Each wrapped part has a graph"):
        lab.graph_diff(opset=15, stage="exported")
    found = lab.graph_diff(opset=20, part="head", stage="exported")
    assert found.graphs[1].part == "head"
    assert found.graphs[1].opset == 20
    assert lab.status.coverage == coverage
    assert lab.options.opset != 20


REFUSED = {
    "one stage": (("gradient",), {}, "one thing only"),
    "a stage and switches": (("gradient", {"memory_level": 1}), {}, "a stage and something else"),
    "two stages and a third": (("gradient", "execution"), {"stage": "exported"}, "stage='exported'"),
    "switches twice": (({},), {"memory_level": 1}, "switches by name beside"),
    "no such stage": (("gradient", "executed"), {}, "no graph stage 'executed'"),
    "no such stage for switches": ((), {"stage": "executed", "memory_level": 1}, "no graph stage 'executed'"),
    "no such switch": ((), {"memory_levle": 1}, "no option 'memory_levle'"),
    "another engine": ((), {"engine": "eager"}, "has no graph to compare"),
    "numbers": ((3, 4), {}, "a int was given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_with_a_way_out(sparse, case):
    sides, named, words = REFUSED[case]
    with pytest.raises(OptionError, match=words) as refusal:
        sparse.graph_diff(*sides, **named)
    assert refusal.value.fix


def test_before_a_step_it_says_what_to_do(lab):
    with pytest.raises(StepError, match="no step to go back to"):
        lab.graph_diff()
    with pytest.raises(BuildError, match="Run a step first"):
        lab.graph_diff(memory_level=1)
    with pytest.raises(BuildError, match="Run a step first"):
        lab.graph_diff("gradient", "execution")
