"""The five stages of a build, what is in each, and where its nodes come from in the model."""

from __future__ import annotations

import linecache
import re
from collections import Counter, OrderedDict
from dataclasses import replace

import onnx
import pytest
import torch
from small_transformers import batch_of, bert, gpt2, llama, step_of

import ortlab
from ortlab.analyses.profiling import spent_on
from ortlab.errors import BuildError, OptionError
from ortlab.graphs import STAGES, Graph, node_names
from ortlab.options.configuration import Configuration
from ortlab.render import html, text

MODES = ("training", "inference")


MAKERS = {
    "bert": lambda: bert(drop=0.1),
    "gpt2": lambda: gpt2(drop=0.1, n_positions=64),
    "llama": lambda: llama(heads=4, num_key_value_heads=2),
}


@pytest.fixture(scope="module", params=MAKERS)
def lab(request):
    """A lab that has run a training step and one forward for inference."""
    torch.manual_seed(0)
    model = MAKERS[request.param]()
    batch = batch_of()
    lab = ortlab.wrap(model)
    lab.step(step_of(model, batch), progress=False)
    model.eval()
    with torch.no_grad():
        model(input_ids=batch["input_ids"])
    model.train()
    yield lab
    lab.unwrap(forget=True)


@pytest.fixture(scope="module")
def bert_lab():
    """A lab that recomputes, so that its backward repeats nodes of the forward."""
    torch.manual_seed(0)
    model = bert(drop=0.1)
    lab = ortlab.wrap(model, memory_level=1)
    lab.step(step_of(model, batch_of()), progress=False)
    yield lab
    lab.unwrap(forget=True)


# ---- stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_all_stages_of_a_mode_are_there_and_are_valid_graphs(lab, mode):
    graphs = lab.graphs(mode=mode)
    assert [graph.stage for graph in graphs] == list(STAGES)
    assert {graph.mode for graph in graphs} == {mode} == {graphs.mode}
    for graph in graphs:
        assert graph.serialized == lab.graph(graph.stage, mode=mode).serialized
        assert graph.node_count == len(graph.summary.nodes) == sum(graph.operators.values())
    table = graphs.table()
    assert list(table["stage"]) == list(STAGES)
    # Only training has a gradient: the same stage of inference is the graph before it, and says so.
    assert (table["backward"].iloc[-2:] > 0).all() == (mode == "training")
    assert graphs.same_as(graphs["gradient"]) == ("" if mode == "training" else "optimized")
    assert ("inference has no gradient" in text.render(graphs)) == (mode == "inference")
    assert "<table" in html.render(graphs)


def test_a_mode_that_has_not_run_says_why_and_what_to_do():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    lab = ortlab.wrap(model)
    with pytest.raises(BuildError, match="no inference graph for the present options yet"):
        lab.graph(mode="inference")
    lab.step(lambda: model(torch.ones(2, 4)).sum().backward(), progress=False)
    with pytest.raises(BuildError, match=r"no inference graph(?s:.*)model\.eval\(\)"):
        lab.graphs(mode="inference")
    lab.unwrap(forget=True)
    lab = ortlab.wrap(model.eval())
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert lab.graph().mode == "inference"
    with pytest.raises(BuildError, match=r"no training graph(?s:.*)model\.train\(\)"):
        lab.graph(mode="training")
    with pytest.raises(OptionError, match="for inference has no activations and no times"):
        lab.graph(activations=True, profile=True)
    lab.unwrap(forget=True)


@pytest.mark.parametrize(
    "name", ["execution_model", "Execution", "exectuion", "optimized_pre_grad", "shadow", 3]
)
def test_an_unknown_stage_names_the_near_one(bert_lab, name):
    near = {"optimized_pre_grad": "'optimized'", "shadow": "", 3: ""}.get(name, "'execution'")
    with pytest.raises(OptionError, match="Stages: exported, processed, optimized") as caught:
        bert_lab.graph(name)
    assert (f"Did you mean {near}?" in str(caught.value)) == bool(near)


def test_what_no_graph_can_have_is_refused(bert_lab):
    with pytest.raises(OptionError, match="optimized graph for training has no activations"):
        bert_lab.graph("optimized", activations=True)
    with pytest.raises(OptionError, match="Modes: training, inference"):
        bert_lab.graph(mode="eval")


def test_the_graph_is_there_while_another_engine_runs_the_model(bert_lab):
    there = bert_lab.graph()
    bert_lab.set(engine="eager")
    try:
        found = bert_lab.graph()
        assert bert_lab.engine == "eager"
    finally:
        bert_lab.set(engine="ort")
    assert found == there
    assert "The lab's engine is eager" in found.note
    bert_lab.set(engine="eager", opset=16)
    try:
        built = bert_lab.graph().note
    finally:
        bert_lab.set(engine="ort", opset=17)
    assert "Built for this page" in built
    assert "The lab's engine is eager" in built
    assert not bert_lab.graph().note


# ---- viewing and saving -------------------------------------------------------------------------------------------


def test_large_constants_are_left_out_for_viewing_and_never_for_saving(tmp_path):
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(x) + torch.linspace(0, 1, 64 * 64).view(64, 64).tolist()[0][0] + constant

    constant = torch.arange(4096.0).view(64, 64)
    model = Shifted()
    lab = ortlab.wrap(model)
    lab.step(lambda: model(torch.ones(64, 64)).sum().backward(), progress=False)
    graph = lab.graph("exported")
    lab.unwrap(forget=True)
    viewed = graph.for_viewing()
    assert 16_384 <= viewed.stripped_bytes < 17_000
    assert len(viewed.serialized) < len(graph.serialized) - 16_000
    assert viewed.operators == graph.operators
    assert viewed.origins == graph.origins
    with pytest.raises(BuildError, match="stripped for viewing"):
        viewed.save(tmp_path / "viewed.onnx")
    assert "left out, for viewing" in text.render(viewed)
    assert graph.for_viewing(limit_bytes=10**6) is graph
    assert not (tmp_path / "viewed.onnx").exists()
    saved = onnx.load(graph.save(tmp_path / "saved.onnx"))
    values = [
        onnx.numpy_helper.to_array(a.t)
        for node in saved.graph.node
        for a in node.attribute
        if a.HasField("t")
    ]
    assert any(value.size == 4096 and value.sum() == constant.sum().item() for value in values)


# ---- where nodes come from ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", STAGES)
def test_nearly_every_forward_node_has_its_module(lab, mode, stage):
    graph = lab.graph(stage, mode=mode)
    summary = graph.summary
    forward = [node for node in summary.nodes if node.phase == "forward"]
    found = summary.origins
    # Every node counts, constants and what ORT put in, too.
    assert sum(found.values()) == len(forward) > 100
    assert summary.mapped_fraction == 1 - found["not known"] / len(forward) >= 0.95
    paths = dict(lab.module.named_modules())
    assert all(node.origin.module in paths for node in forward)
    # "recorded" means that the name of the node itself has the path, or at least where it begins.
    for node in forward:
        if node.origin.how == "recorded":
            assert node.name.startswith("/_original_module/")
            assert node.origin.module.split(".")[0] in node.name
    assert found["recorded"] / len(forward) >= 0.85
    assert summary.lines_recorded / len(forward) >= 0.6


def test_a_recorded_line_is_the_line_that_the_operator_was_called_in(lab):
    calls = {
        "q_proj": "q_proj(",
        "query": "query(",
        "c_attn": "c_attn(",
        "lm_head": "lm_head(",
        "dense": "dense(",
    }
    found = set()
    for node in lab.graph("execution").summary.forward_nodes:
        if node.origin.line_recorded and node.operator.endswith(("MatMul", "ReduceSum")):
            name = node.origin.module.rpartition(".")[2]
            file, _, line = node.origin.source.rpartition(":")
            if name in calls:
                assert calls[name] in linecache.getline(file, int(line))
                found.add(name)
    model = type(lab.module).__name__
    if model != "GPT2LMHeadModel":  # its Conv1D calls torch.addmm itself
        assert (
            found >= {"BertForMaskedLM": {"query", "dense"}, "LlamaForCausalLM": {"q_proj", "lm_head"}}[model]
        )


class Recursive(torch.nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self(self.leaf(x), depth - 1) if depth else x


class Doubled(torch.nn.Module):
    """Calls a nested `Sequential`, parts of it and a part of a part more than once; a sibling is called "cell_1"."""

    def __init__(self) -> None:
        super().__init__()
        inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(inner, torch.nn.Sigmoid()))
        self.owner = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "down": torch.nn.ReLU()})
        self.cell, self.cell_1 = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.tree = Recursive()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.body, self.body, self.body[1], self.body[1][0], self.cell, self.cell, self.cell_1):
            x = part(x)
        return self.owner["down"](self.owner["body"](self.tree(x)))


@pytest.mark.parametrize("only", [None, ["inside"]])
def test_each_call_of_a_module_has_a_name_that_leads_to_the_module(only):
    model, called = torch.nn.Sequential(OrderedDict(inside=Doubled())), []
    for path, module in model.named_modules():
        if path and not list(module.children()):
            module.register_forward_hook(lambda *_, path=path: called.append(path))
    model(torch.randn(2, 4))  # without ONNX Runtime
    expected, lab = Counter(called), ortlab.wrap(model, only=only)
    try:
        lab.step(lambda: model(torch.randn(2, 4)).sum().backward(), progress=False)
        graph = lab.graph("exported", part="inside" if only else None)
        found = graph.summary.forward_nodes
        assert Counter(node.origin.module for node in found if node.origin.module in expected) == expected
        assert {node.origin.how for node in found if node.origin.module in expected} == {"recorded"}
        assert [node.name.split("/")[-2] for node in found if node.origin.module == "inside.cell"] == [
            "cell",
            "cell#2",
        ]
    finally:
        lab.unwrap(forget=True)


def test_fused_nodes_keep_their_module(lab):
    activations = {
        "BertForMaskedLM": ("com.microsoft.Gelu", "intermediate_act_fn"),
        "GPT2LMHeadModel": ("com.microsoft.FastGelu", "act"),
        "LlamaForCausalLM": ("com.microsoft.QuickGelu", "act_fn"),
    }
    operator, ends = activations[type(lab.module).__name__]
    fused = [node for node in lab.graph().summary.forward_nodes if node.operator == operator]
    assert len(fused) >= 2
    layers = {node.origin.layer for node in fused if node.origin.module.endswith(ends)}
    assert len(layers) >= 2


def test_what_is_inferred_is_right_where_it_can_be_checked(bert_lab):
    """Take a recorded name away, with those of the results: what is concluded then is the same, or nothing."""
    graph = bert_lab.graph("execution")
    truth = graph.origins
    names = node_names(graph.model.graph)
    checked = known = 0
    for place in range(0, len(names), 4):
        if truth[names[place]].how != "recorded":
            continue
        anonymous = onnx.ModelProto()
        anonymous.CopyFrom(graph.model)
        node = anonymous.graph.node[place]
        renamed = {name: f"value_{number}" for number, name in enumerate(node.output) if name}
        node.name = ""
        node.output[:] = [renamed.get(name, name) for name in node.output]
        for other in anonymous.graph.node:
            other.input[:] = [renamed.get(name, name) for name in other.input]
        again = replace(graph, serialized=anonymous.SerializeToString())
        concluded = again.origins[node_names(anonymous.graph)[place]]
        assert concluded.how != "recorded"
        if concluded.is_known:
            assert concluded.module == truth[names[place]].module, names[place]
            known += 1
        checked += 1
    assert checked > 40
    assert known > checked // 4


def test_an_export_from_the_disk_has_no_lines_and_says_so(tmp_path):
    def built():
        torch.manual_seed(0)
        model = MAKERS["gpt2"]()
        lab = ortlab.wrap(model, export_cache_dir=str(tmp_path))
        lab.step(step_of(model, batch_of()), progress=False)
        summary = lab.graph("exported").summary
        lab.unwrap(forget=True)
        return summary

    fresh, from_disk = built(), built()
    assert list(tmp_path.iterdir())
    assert fresh.lines_recorded > 0
    assert from_disk.lines_recorded == 0
    assert from_disk.origins == fresh.origins
    inside = next(node for node in from_disk.nodes if node.origin.module.endswith("h.0.attn"))
    assert inside.origin.source.rpartition("/")[2].startswith("modeling_gpt2.py:")


def test_a_graph_without_its_lab_goes_by_names_alone(bert_lab):
    graph = bert_lab.graph("exported")
    alone = Graph("exported", "training", graph.serialized)
    same = sum(one.module == graph.origins[name].module for name, one in alone.origins.items())
    assert same / len(alone.origins) > 0.95
    assert not any(one.source for one in alone.origins.values())


# ---- the summary --------------------------------------------------------------------------------------------------


def test_inputs_outputs_and_parameters(lab):
    summary = lab.graph().summary
    kinds = [kind for _, kind in summary.inputs]
    assert kinds[:2] == ["input", "input"]
    ids, _ = summary.inputs[0]
    assert (ids.name, ids.shape) == ("input_ids", ("input_ids_dim0", "input_ids_dim1"))
    named = dict(lab.module.named_parameters())
    assert summary.parameter_count == kinds.count("parameter") == len(named)
    assert summary.parameter_bytes == sum(one.nbytes for one in named.values())
    outputs = [kind for _, kind in summary.outputs]
    assert outputs.count("output") == 2  # loss and logits
    assert outputs.count("gradient") == len(named)
    assert summary.opsets["ai.onnx"] == lab.graph().opset
    assert len(summary.value_table()) == len(summary.inputs) + len(summary.outputs)


def test_times_are_those_of_the_profile_by_pass(bert_lab):
    trace = bert_lab.profile(n=1, progress=False)
    graph = bert_lab.graph().with_profile(trace)
    summary = graph.summary
    table = summary.table()
    assert summary.unmeasured == 0
    assert summary.counts["recomputed"] == sum(bool(node.recomputes) for node in trace.nodes) > 0
    assert table["recomputed [ms]"].sum() == pytest.approx(trace.recomputed_ms)
    assert table["forward [ms]"].sum() == pytest.approx(trace.forward_ms)
    assert table["backward [ms]"].sum() == pytest.approx(trace.backward_ms - trace.recomputed_ms)
    assert table["time [ms]"].is_monotonic_decreasing
    assert table["count"].sum() == graph.node_count - 1  # the border runs in neither pass
    for written in (text.render(graph), html.render(graph)):
        assert "Operators by time, measured" in written
        assert "recomputed time" in written
    with pytest.raises(OptionError, match="profile is of another graph"):
        bert_lab.graph("exported").with_profile(trace)


def test_a_profile_accounts_for_the_whole_step(bert_lab):
    trace = bert_lab.profile(n=2, progress=False)
    account = trace.account()
    assert all(ms >= 0 for ms in account.values())
    assert sum(account.values()) == pytest.approx(trace.step_ms)
    called = sum(node.ms for node in trace.nodes if node.by_torch)
    assert account["calls from its graph into PyTorch"] == pytest.approx(called)
    ours = [node for node in trace.nodes if node.operator.startswith("ortlab::")]
    assert ours
    assert all(node.by_torch for node in ours)
    assert not any(
        node.by_torch for node in trace.nodes if node.operator in {"Gemm", "com.microsoft.Gelu", "MatMul"}
    )
    assert account["kernels of ONNX Runtime"] + called == pytest.approx(trace.forward_ms + trace.backward_ms)
    beside = [part for part in account if part in trace.beside]
    assert len(beside) == 4
    assert account["Python around the session"] > 0
    page = text.render(trace)
    assert all(part in page for part in account)
    slowest = trace.slowest()
    assert len(slowest) == 3
    assert 0 < sum(slowest.values()) <= 1
    # However small its operators are, a part that takes more than another stands before it.
    nodes = Counter(node.operator for node in trace.nodes)
    each = tuple(replace(node, ms=1 / nodes[node.operator]) for node in trace.nodes)
    small = replace(trace, nodes=each, beside={"between kernels": 5.0})
    account = small.account()
    assert len(nodes) > 20
    assert list(small.slowest().items()) == [
        (part, pytest.approx(account[part] / small.step_ms))
        for part in sorted(account, key=lambda one: -account[one])
    ]


def test_what_a_step_is_spent_on_is_said_of_another_configuration(bert_lab):
    bench = bert_lab._bench
    before = bench.configuration
    said = spent_on(bench, Configuration("ort", before.options.replace(aten_backward=False)), progress=False)
    assert len(re.findall(r"[^,]+ \([\d.e-]+ %\)", said)) == 3
    assert bench.configuration == before


def test_activations_edges_lead_from_forward_to_backward(bert_lab):
    graph = bert_lab.graph(activations=True)
    phase = {node.name: node.phase for node in graph.summary.nodes}
    edges = graph.summary.edge_table()
    assert len(edges) > 10
    assert {phase[name] for name in edges["from"]} == {"forward"}
    assert {phase[name] for name in edges["to"]} <= {"backward", "recomputed"}
    buffers = edges.drop_duplicates("value")
    returned = sum(row.bytes for row in graph.activations.rows if not row.kept_by)
    assert buffers["bytes"].sum() + returned == graph.activations.total_bytes
    assert "Kept from forward to backward" in text.render(graph)
