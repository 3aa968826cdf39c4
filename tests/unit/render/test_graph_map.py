"""The rows of a graph's map: every node once, forward and backward in one row, bytes and words of the records."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
from onnx import TensorProto, helper
from small_transformers import batch_of, bert, step_of

import ortlab
from ortlab.errors import OptionError
from ortlab.graphs.nodes import node_names
from ortlab.graphs.stages import STAGES, Graph
from ortlab.render.graph_map import KINDS, MANY_LAYERS, NOT_KNOWN, OWN, graph_map

HOSTILE = '"><script>hacked=1</script>\x00\x1b[31m' + "x" * 300


@pytest.fixture(scope="module")
def lab():
    torch.manual_seed(3)
    model = bert(width=16, words=50, drop=0.1)
    step = step_of(model, batch_of(words=50))

    lab = ortlab.wrap(model)
    lab.step(step, progress=False)
    lab.set(memory_level=1)
    lab.step(step, progress=False)
    lab.rerun(engine="eager")
    yield lab
    lab.unwrap()


@pytest.fixture(scope="module")
def graph(lab):
    return lab.graph(activations=True)


def within(rows, at):
    """Numbers of a row and of all below it."""
    found = {at}
    for number, row in enumerate(rows):
        if row["p"] in found:
            found.add(number)
    return found


def chain(names):
    """One operator after another, with these names."""
    values = ["x", *(f"v{number}" for number in range(len(names)))]
    nodes = [
        helper.make_node("Relu", values[at : at + 1], values[at + 1 : at + 2], name=name)
        for at, name in enumerate(names)
    ]
    ends = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [2]) for value in (values[0], values[-1])]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]))
    return Graph("exported", "inference", model.SerializeToString())


@pytest.mark.parametrize("stage", STAGES)
def test_every_node_is_in_one_row_and_counted_in_those_above_it(lab, stage):
    graph = lab.graph(stage)
    rows = graph_map(graph)["rows"]
    names = [name for row in rows for name in row.get("n", ())]
    border = {node.name for node in graph.model.graph.node if node.op_type == "YieldOp"}
    assert sorted(names) == sorted(set(node_names(graph.model.graph)) - border)
    for at, row in enumerate(rows):
        below = [rows[one] for one in within(rows, at) if "n" in rows[one]]
        for side in "fb":
            assert sum(row[side]["k"].values()) == sum(sum(one[side]["k"].values()) for one in below)
        assert row["p"] < at
        assert row["d"] == (0 if row["p"] < 0 else rows[row["p"]]["d"] + 1)


def test_forward_and_backward_of_an_operation_stand_in_one_row_and_layers_in_order(graph):
    told = graph_map(graph)
    rows = told["rows"]
    titles = [row["t"] for row in rows]
    assert titles.index("layer.0") < titles.index("layer.1")
    path = "bert.encoder.layer.1.intermediate.dense"
    dense = next(row for row in rows if dict(row["facts"]).get("module") == path)
    assert dense["f"]["k"]
    assert dense["b"]["k"]
    embeddings = rows[titles.index("embeddings")]
    source = dict(embeddings["facts"])["source"]
    assert re.fullmatch(r"transformers/models/bert/modeling_bert\.py:\d+", source)
    keeps = [dict(row["facts"]).get("keeps", "") for row in rows]
    assert any(re.fullmatch(r"[\d.,]+ \w+ in \d+ buffers", words) for words in keeps)
    assert OWN in titles
    assert {"products", "norms, softmax"} <= set(told["kinds"].values())


def test_bytes_are_those_of_the_saved_activations_and_go_where_they_are_read_last(lab, graph):
    told = graph_map(graph)
    rows, kept = told["rows"], lab.activations()
    roots = [row for row in rows if row["p"] < 0]
    read = [row for row in kept.rows if row.kept_by]
    assert sum(row["f"]["by"] for row in roots) == sum(row.bytes for row in read)
    assert sum(row["b"]["by"] for row in roots) == sum(row.bytes for row in read)
    places = {name: at for at, row in enumerate(rows) for name in row.get("n", ())}
    order = {name: at for at, name in enumerate(node_names(graph.model.graph))}
    expected = Counter(
        (places[row.node], places[max(row.kept_by, key=order.__getitem__)], row.bytes) for row in read
    )
    assert Counter(map(tuple, told["kept"])) == expected
    largest = max(read, key=lambda row: row.bytes)
    facts = rows[places[largest.node]]["facts"]
    assert any(name == "keeps" and largest.dtype in words for name, words in facts)
    assert any(name == "read by" for name, _ in facts)
    assert told["sized"]
    assert not told["planned"]


def test_times_are_those_of_the_profile_and_recomputed_parts_have_their_share(lab):
    graph = lab.graph(activations=True, profile=True)
    told = graph_map(graph)
    roots = [row for row in told["rows"] if row["p"] < 0]
    for side, expected in (("f", graph.trace.forward_ms), ("b", graph.trace.backward_ms)):
        assert sum(row[side]["ms"] for row in roots) == pytest.approx(expected, abs=0.05)
    assert sum(row["b"]["rms"] for row in roots) == pytest.approx(graph.trace.recomputed_ms, abs=0.05)
    assert sum(row["b"]["r"] for row in roots) == sum(bool(node.recomputes) for node in graph.trace.nodes)
    assert told["timed"]


def test_plans_are_named_with_what_they_remove(lab):
    lab.set(memory_level=0)
    try:
        graph = lab.graph().with_activations(lab.activations(plans=True, progress=False))
        told = graph_map(graph)
    finally:
        lab.set(memory_level=1)
    assert told["planned"]
    offered = {plan for row in graph.activations.rows for plan in row.plans}
    named = [words for row in told["rows"] for name, words in row["facts"] if name == "plans that remove it"]
    lines = {line.rpartition(": ")[0] for words in named for line in words.split("\n") if ": " in line}
    assert lines
    assert lines <= offered


def test_what_changed_between_two_runs_is_marked_and_what_is_gone_stands_there(lab):
    first, second = lab.runs.run(1), lab.runs.run(2)
    forth, back = lab.graph_diff(first, second), lab.graph_diff(second, first)
    assert forth.before.name == "run #1 ort"
    assert "memory_level=1" in forth.after.name
    told = graph_map(forth.graphs[1], forth)
    assert told["marks"]["recomputed"] == str(len(forth.recomputed))
    assert told["sized"]
    undone = graph_map(back.graphs[1], back)
    removed = [row for row in undone["rows"] if row["b"]["m"].get("removed")]
    assert int(undone["marks"]["removed"]) == len(back.recomputed_before) + len(back.removed)
    assert removed
    assert all(dict(row["facts"])["what changed"] for row in undone["rows"])
    names = {name for row in undone["rows"] for name in row.get("n", ())}
    assert names <= set(node_names(back.graphs[1].model.graph))


def test_what_runs_first_stands_first_whatever_its_backward_is_called():
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 9))
    lab = ortlab.wrap(model)
    try:
        lab.step(lambda: model(torch.arange(9)).square().mean().backward(), n=1, progress=False)
        rows = graph_map(lab.graph())["rows"]
    finally:
        lab.unwrap()
    assert [row["t"] for row in rows if row["p"] < 0] == ["0", "1", "2"]


def test_a_run_of_pytorch_has_no_graph_to_compare(lab):
    with pytest.raises(OptionError, match="has no graph to compare"):
        lab.graph_diff(lab.runs.run(1), lab.runs.run(3))


def test_hundreds_of_layers_fold_and_names_stay_short_and_printable():
    names = [f"/layers.{number}/fc/Relu" for number in range(500)]
    rows = graph_map(chain(names))["rows"]
    assert [row["t"] for row in rows if row["d"] == 0] == ["layers.0.fc", "layers.1 to 498", "layers.499.fc"]
    assert (
        sum(row["p"] == 1 + next(at for at, row in enumerate(rows) if "to" in row["t"]) - 1 for row in rows)
        == 498
    )
    few = [f"/layers.{number}/fc/Relu" for number in range(MANY_LAYERS)]
    assert not any(" to " in row["t"] for row in graph_map(chain(few))["rows"])
    told = graph_map(chain([f"/{HOSTILE}/Relu", HOSTILE, "Relu"]))
    assert all(len(row["t"]) <= 80 for row in told["rows"])
    assert "\x00" not in "".join(row["t"] + str(row["facts"]) for row in told["rows"])


def test_one_node_without_backward_is_a_map_too():
    told = graph_map(chain(["Relu"]))
    assert [row["t"] for row in told["rows"]] == [NOT_KNOWN, "Relu"]
    assert not told["backward"]
    assert told["kept"] == []
    assert set(told["kinds"].values()) == {KINDS[2][0]}
    assert json.loads(json.dumps(told)) == told
