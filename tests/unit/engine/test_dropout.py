"""Dropout by ortlab's library: the bits of ONNX Runtime's kernels, with plans and without, from one count of seeds."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from small_transformers import batch_of, bert
from torch import nn

import ortlab
from ortlab.engine.operators import compiled_calls, dropout

pytestmark = [
    pytest.mark.usefixtures("ortmodule"),
    pytest.mark.filterwarnings("ignore:Setting `training` to something:DeprecationWarning"),
]


def session_of(node, inputs, outputs, ratio):
    constants = [
        numpy_helper.from_array(np.float32(ratio), "ratio"),
        numpy_helper.from_array(np.array(True), "training"),
    ]
    values = [
        [helper.make_tensor_value_info(name, kind, [None]) for name, kind in of] for of in (inputs, outputs)
    ]
    graph = helper.make_graph([node], "dropout", *values, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def entries(count):
    x = np.random.default_rng(count).standard_normal(count, dtype=np.float32)
    x[: min(count, 4)] = [np.nan, np.inf, -0.0, 0.0][:count]
    return x


def same_bits(one, other):
    return np.array_equal(one.view(np.int32), other.view(np.int32))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 2**18 + 5])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.999])
def test_it_drops_what_onnxruntime_drops(count, ratio):
    node = helper.make_node("Dropout", ["x", "ratio", "training"], ["y", "mask"])
    session = session_of(
        node, [("x", TensorProto.FLOAT)], [("y", TensorProto.FLOAT), ("mask", TensorProto.BOOL)], ratio
    )
    x = entries(count)
    for seed in (2, 8211, 2**31 - 1, 2**31 + 5, 2**40 + 3):
        onnxruntime.set_seed(seed)
        for _ in range(2):  # the second takes the next seed
            expected, mask = session.run(None, {"x": x})
            made, of_library = dropout.dropout(torch.from_numpy(x), ratio, True, 0)
            assert same_bits(made.numpy(), expected)
            assert np.array_equal(of_library.numpy(), mask)


@pytest.mark.parametrize("count", [1, 33, 100_001])
def test_its_gradient_is_onnxruntimes(count):
    node = helper.make_node(
        "DropoutGrad", ["grad", "mask", "ratio", "training"], ["made"], domain="com.microsoft"
    )
    inputs = [("grad", TensorProto.FLOAT), ("mask", TensorProto.BOOL)]
    session = session_of(node, inputs, [("made", TensorProto.FLOAT)], 0.3)
    grad, mask = entries(count), np.random.default_rng(0).random(count) < 0.7
    (expected,) = session.run(None, {"grad": grad, "mask": mask})
    given = torch.from_numpy(grad), torch.from_numpy(mask).view(torch.uint8)
    assert same_bits(dropout.dropout_backward(*given, 0.3, True).numpy(), expected)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.second = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        hidden = self.middle(nn.functional.gelu(self.first(x)))
        return self.second(nn.functional.dropout(hidden, 0.4) + nn.functional.dropout(hidden, 0.4))


def operators(lab):
    return {node.op_type for node in executed(lab)} | {
        one.s.decode() for node in executed(lab) for one in node.attribute if one.name == "operator"
    }


def executed(lab):
    return lab.graph("execution").model.graph.node


def train(net, batches):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Dropping()


BATCHES = torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(0))


def without_library(monkeypatch):
    monkeypatch.setattr("ortlab.engine.sessions.with_quick_dropouts", lambda _: None)


def test_training_is_the_same_as_with_onnxruntimes_kernels(net, monkeypatch):
    twin = copy.deepcopy(net)
    lab = ortlab.wrap(net)
    torch.manual_seed(7)
    losses = train(net, BATCHES)
    assert "ortlab::dropout" in operators(lab)
    without_library(monkeypatch)
    of_twin = ortlab.wrap(twin)
    torch.manual_seed(7)
    assert train(twin, BATCHES) == losses
    assert "Dropout" in operators(of_twin)
    assert len(set(losses)) == len(losses)


def test_two_dropouts_of_one_tensor_drop_differently(net):
    ortlab.wrap(net)
    torch.manual_seed(0)
    with torch.no_grad():
        net.middle.weight.zero_()
        net.middle.bias.fill_(0.6)
        net.second.weight.fill_(1)
        net.second.bias.zero_()
    # Each entry is kept by none, one or both, and counts 0, 1 or 2: with one mask for both no sum would be odd.
    sums = net(torch.zeros(64, 16))[:, 0].detach().round()
    assert (sums % 2 == 1).any()


def half_trained(net):
    """Train a net on all batches and its twin on the first two; return the twin, its lab, and the losses of both."""
    twin = copy.deepcopy(net)
    ortlab.wrap(net)
    torch.manual_seed(3)
    expected = train(net, BATCHES)
    lab = ortlab.wrap(twin)
    torch.manual_seed(3)
    losses = train(twin, BATCHES[:2])
    return lab, twin, losses, expected


@pytest.mark.parametrize("in_library", [True, False])
def test_a_plan_goes_on_with_the_same_masks(net, in_library, monkeypatch):
    """Also where ONNX Runtime computes its dropouts meanwhile, and another session before and after."""
    lab, twin, losses, expected = half_trained(net)
    (plan,) = {f"{row.cluster}:1:-1" for row in lab.plan().rows if row.cluster.startswith("Gelu+")}
    with monkeypatch.context() as patched:
        if not in_library:
            without_library(patched)
        lab.set(memory_plan=(plan,))
        losses += train(twin, BATCHES[2:4])
        assert ("ortlab::dropout" in operators(lab)) == in_library
        assert any(node.name.endswith("_recompute") for node in executed(lab))
    lab.set(memory_plan=())
    losses += train(twin, BATCHES[4:])
    assert "ortlab::dropout" in operators(lab)
    assert losses == expected


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.second = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        hidden = nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.4)
        return self.second(nn.functional.dropout(nn.functional.gelu(self.middle(hidden)), 0.4))


@pytest.fixture
def stacked():
    torch.manual_seed(0)
    return Stacked()


def repeats(lab):
    return [
        node.name for node in executed(lab) if node.name.endswith("_recompute") and "Dropout" in node.name
    ]


def plan_of(lab, places=-1):
    (cluster,) = {row.cluster for row in lab.plan().rows if "Dropout" in row.cluster}
    return f"{cluster}:1:{places}"


@pytest.mark.parametrize("places", [2, 1, -1])
def test_a_plan_that_recomputes_dropout_drops_what_no_plan_drops(stacked, places):
    lab, twin, losses, expected = half_trained(stacked)
    lab.set(memory_plan=(plan_of(lab, places),))
    losses += train(twin, BATCHES[2:4])
    assert len(repeats(lab)) == (2 if places < 0 else places)
    assert "ortlab::dropout_repeated" in operators(lab)
    assert "Dropout" not in operators(lab)
    lab.set(memory_plan=())
    assert losses + train(twin, BATCHES[4:]) == expected


def test_each_backward_repeats_the_dropouts_of_its_own_forward(stacked):
    twin = copy.deepcopy(stacked)
    ortlab.wrap(stacked)
    lab = ortlab.wrap(twin)
    twin(BATCHES[0])
    lab.set(memory_plan=(plan_of(lab),))
    gradients = []
    for net in (stacked, twin):
        net(BATCHES[0])
        torch.manual_seed(5)
        first, second = net(BATCHES[0]), net(BATCHES[1])
        first.square().mean().backward()
        second.square().mean().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert repeats(lab)
    assert all(map(torch.equal, *gradients))


def test_a_plan_keeps_onnxruntimes_dropouts_where_they_have_no_stand_in(stacked, monkeypatch):
    def unless_repeated(model):
        repeated = any(node.name.endswith("_recompute") for node in model.graph.node)
        return None if repeated else dropout.with_quick_dropouts(model)

    monkeypatch.setattr("ortlab.engine.sessions.with_quick_dropouts", unless_repeated)
    lab = ortlab.wrap(stacked)
    train(stacked, BATCHES[:1])
    lab.set(memory_plan=(plan_of(lab),))
    train(stacked, BATCHES[1:2])
    assert repeats(lab)
    assert "Dropout" in operators(lab)
    assert "ortlab::dropout" not in operators(lab)


def test_what_a_level_keeps_is_told_as_with_onnxruntimes_dropouts(monkeypatch):
    kept = []
    for level in (0, 1, 1):
        torch.manual_seed(0)
        lab = ortlab.wrap(bert(drop=0.1), memory_level=level)
        lab.step(lambda lab=lab: lab.module(**batch_of(4, 16)).loss.backward(), n=1, memory=False)
        kept.append(lab.activations().total_bytes)
        if level:
            without_library(monkeypatch)  # for the last
    seeds = 8 * len(repeats(lab))  # which the library's hand on
    assert kept[2] <= kept[1] <= kept[2] + seeds < 0.5 * kept[0]


def test_repeated_dropouts_have_onnxruntimes_names_and_run_in_its_order(stacked, monkeypatch, tmp_path):
    ran = []
    for net in (stacked, copy.deepcopy(stacked)):
        lab = ortlab.wrap(net, save_onnx=True, save_onnx_path=str(tmp_path), save_onnx_prefix="net")
        lab.step(lambda net=net: net(BATCHES[0]).square().mean().backward(), n=1)
        lab.set(memory_plan=(plan_of(lab),))
        lab.rerun()
        (plan,) = [row for row in lab.plan().rows if "Dropout" in row.cluster]
        assert plan.applied == 2
        profile = lab.profile(progress=False)
        ran.append([(node.name, node.operator, node.recomputes) for node in profile.nodes])
        (file,) = tmp_path.glob("*execution*training*.onnx")
        assert any(node.name.endswith("Dropout_recompute") for node in onnx.load(file).graph.node)
        without_library(monkeypatch)  # for the second
    assert ran[0] == ran[1]
    assert [operator for _, operator, _ in ran[0]].count("Dropout") == 4


def test_its_nodes_have_onnxruntimes_names(net):
    lab = ortlab.wrap(net)
    lab.step(lambda: net(BATCHES[0]).square().mean().backward(), n=1)
    found = [node.operator for node in lab.graph("execution").summary.nodes]
    assert found.count("Dropout") == found.count("com.microsoft.DropoutGrad") == 2
    change = lab.graph_diff({}, {"memory_plan": ("Gelu+:1:-1",)})
    assert len(change.sentences) == 1
    assert change.sentences[0].startswith("Added 1 recompute node: Gelu")
    assert {node.operator for node in lab.profile(progress=False).nodes} >= {
        "Dropout",
        "com.microsoft.DropoutGrad",
    }


def made_of(*nodes, kind=TensorProto.FLOAT, ratio=0.1):
    constants = [
        numpy_helper.from_array(np.float32(ratio), "ratio"),
        numpy_helper.from_array(np.array(True), "training"),
    ]
    x, y = (helper.make_tensor_value_info(name, kind, [4]) for name in "xy")
    mask = helper.make_tensor_value_info("mask", TensorProto.BOOL, [4])
    graph = helper.make_graph(nodes, "graph", [x], [y], constants, value_info=[mask])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


DROPPING = helper.make_node("Dropout", ["x", "ratio", "training"], ["y", "mask"], name="first")


def test_the_graph_itself_stays_as_it_is():
    model = made_of(DROPPING)
    before = model.SerializeToString()
    quick = dropout.with_quick_dropouts(model)
    assert [node.name for node in quick.graph.node if node.op_type == "ATen"] == ["first"]
    assert {value.type.tensor_type.elem_type for value in quick.graph.value_info} == {TensorProto.UINT8}
    assert model.SerializeToString() == before


SEEDED = helper.make_node("Dropout", ["x", "ratio", "training"], ["y", "mask"], seed=5)
READ = helper.make_node("Cast", ["mask"], ["z"], to=TensorProto.FLOAT)


@pytest.mark.parametrize(
    "model",
    [
        made_of(helper.make_node("Identity", ["x"], ["y"])),
        made_of(DROPPING, kind=TensorProto.DOUBLE),
        made_of(helper.make_node("Dropout", ["x"], ["y", "mask"])),
        made_of(helper.make_node("Dropout", ["x", "x", "training"], ["y", "mask"])),
        made_of(DROPPING, ratio=1.0),
        made_of(SEEDED),
        made_of(DROPPING, READ),
    ],
    ids=["no dropout", "doubles", "no mode", "no constant ratio", "all dropped", "seeded", "mask read"],
)
def test_what_it_does_not_compute_stays_onnxruntimes(model):
    assert dropout.with_quick_dropouts(model) is None


def test_a_seed_set_in_onnxruntime_is_the_librarys_too():
    onnxruntime.set_seed(41)
    assert compiled_calls.library().ortlab_take_seeds(2) == 41
    assert compiled_calls.library().ortlab_take_seeds(1) == 43


@pytest.mark.parametrize("change", [{"memory_level": 1}, {"memory_level": 1, "recompute": "layers:1/2"}])
def test_a_level_has_the_gradients_of_no_level(change):
    torch.manual_seed(0)
    model = bert(words=60, drop=0.2)
    batch, twin = batch_of(words=60, first=1, mask=True), copy.deepcopy(model)
    gradients = []
    for one, options in ((model, {}), (twin, change)):
        lab = ortlab.wrap(one, **options)
        torch.manual_seed(4)
        one(**batch).loss.backward()
        gradients.append([parameter.grad for parameter in one.parameters()])
        found = operators(lab)
        lab.unwrap(forget=True)
    assert "ortlab::dropout_repeated" in found
    assert all(map(torch.equal, *gradients))


def test_the_tracker_of_ort_counts_a_phase_from_where_it_is_told():
    from onnxruntime.training.ortmodule._logger import ORTModuleInitPhase, TimeTracker

    tracker, phase = TimeTracker(), ORTModuleInitPhase.CREATE_SESSION
    tracker.start(phase)
    tracker.starts_[phase] -= 1000  # as `ortlab.engine.sessions` does, so that both sessions count
    tracker.end(phase)
    assert 1000 <= tracker._get_duration(phase) < 1100
