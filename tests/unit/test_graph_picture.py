"""The still picture of a graph: its modules, what flows between them, and names that stay text."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch
from onnx import TensorProto, helper
from small_transformers import batch_of, bert

import ortlab
from ortlab.graphs.nodes import node_names
from ortlab.graphs.outline import ITSELF, ROWS, outline
from ortlab.graphs.stages import STAGES, Graph
from ortlab.render import graph_picture, html, text
from ortlab.render.graph_picture import picture

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '"><script>hacked=1</script><img src=x onerror="hacked=1">&amp;\x00\x1b[31m🔥' + "x" * 10_000


@pytest.fixture(scope="module")
def graphs():
    torch.manual_seed(3)
    model = bert(width=16, words=50, drop=0.1)
    lab = ortlab.wrap(model)
    model(**batch_of(words=50)).loss.backward()
    yield {stage: lab.graph(stage) for stage in STAGES}
    lab.unwrap()


def parsed(svg: str) -> ET.Element:
    """Parse it as strictly as a browser parses XML."""
    return ET.fromstring(svg)  # noqa: S314 - we have written it


def chain(names: list[str]) -> Graph:
    """A graph of one operator after another, with these names."""
    values = ["x", *(f"v{number}" for number in range(len(names)))]
    nodes = [
        helper.make_node("Relu", [values[at]], [values[at + 1]], name=name) for at, name in enumerate(names)
    ]
    ends = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [2]) for value in (values[0], values[-1])]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]))
    return Graph("exported", "inference", model.SerializeToString())


@pytest.mark.parametrize("stage", STAGES)
def test_every_node_is_in_one_module_of_the_outline(graphs, stage):
    drawn = outline(graphs[stage])
    names = [name for module in drawn.modules for name in (*module.forward, *module.backward)]
    border = [node.name for node in graphs[stage].model.graph.node if node.op_type == "YieldOp"]
    assert sorted(names) == sorted(set(node_names(graphs[stage].model.graph)) - set(border))
    assert len(border) == (stage in {"gradient", "execution"})
    assert 5 < len(drawn.modules) <= ROWS
    assert drawn.has_backward == bool(border)
    for module in drawn.modules:
        assert sum(module.forward_operators.values()) == len(module.forward)
        assert sum(module.backward_operators.values()) == len(module.backward)


def test_the_modules_stand_in_the_order_of_the_forward_and_keep_values_for_their_backward(graphs):
    drawn = outline(graphs["execution"])
    titles = [module.title for module in drawn.modules]
    first, second = (titles.index(f"bert.encoder.layer.{number}.attention") for number in (0, 1))
    assert (
        titles.index("bert.embeddings.LayerNorm") < first < second < titles.index("cls.predictions.decoder")
    )
    assert ITSELF in titles
    kept = {(flow.source, flow.target): flow.values for flow in drawn.flows if flow.is_kept}
    assert kept[first, first] > 1
    assert kept[second, second] == kept[first, first]
    assert not [flow for flow in drawn.flows if flow.sides == ("backward", "forward")]


def test_the_picture_is_small_deterministic_and_well_formed(graphs):
    graph = graphs["execution"]
    drawn = picture(graph)
    again = Graph(graph.stage, graph.mode, graph.serialized, graph.part, graph.traced)
    assert picture(again) == drawn
    assert len(drawn) < 60_000
    root = parsed(drawn)
    boxes = list(root.iter(f"{SVG}rect"))
    rows = outline(graph).modules
    assert len(boxes) == sum(bool(row.forward) + bool(row.backward) for row in rows)
    shown = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert "forward" in shown
    assert "kept for backward" in shown
    tips = [element.text for element in root.iter(f"{SVG}title")]
    assert any("bert.encoder.layer.0.attention\n" in tip for tip in tips)
    # Text stays within the picture.
    width = float(root.get("viewBox").split()[2])
    for element in root.iter(f"{SVG}text"):
        if element.get("text-anchor") is None:
            assert float(element.get("x")) + 7.5 * len(element.text) < width


def test_marks_are_counted_in_the_boxes(graphs):
    graph = graphs["execution"]
    module = next(row for row in outline(graph).modules if row.title.endswith("layer.1.attention"))
    marks = dict.fromkeys(module.forward[:3], "added") | {module.forward[4]: "fused", "no such node": "moved"}
    drawn = picture(graph, marks=marks)
    assert "3 added, 1 fused" in drawn
    assert "moved" not in drawn
    assert drawn != picture(graph)


def test_a_long_list_of_layers_is_folded_and_a_wide_model_is_cut():
    parts = ("attention/q", "attention/k", "mlp/up", "mlp/down")
    names = [f"/m/layers.{layer}/{part}/Relu" for layer in range(40) for part in parts]
    drawn = outline(chain(names))
    titles = [module.title for module in drawn.modules]
    assert titles[0].startswith("m.layers.0")
    assert "m.layers.1 to 38" in titles
    assert titles[-1].startswith("m.layers.39")
    assert len(titles) <= ROWS
    assert sum(len(module.forward) for module in drawn.modules) == len(names)

    wide = outline(chain([f"/branch_{chr(97 + at // 26)}{chr(97 + at % 26)}/Relu" for at in range(300)]))
    assert len(wide.modules) == ROWS
    assert any(module.title == f"{300 - ROWS + 1} more modules" for module in wide.modules)
    assert sum(len(module.forward) for module in wide.modules) == 300


def test_names_stay_text_however_they_are_written():
    graph = chain([f"/m/{HOSTILE}/Relu", f"/m/{HOSTILE}/Relu", "", "Relu"])
    drawn = picture(graph, marks={HOSTILE: "added"})
    root = parsed(drawn)
    assert {element.tag for element in root.iter()} <= {
        f"{SVG}{name}" for name in ("svg", "title", "defs", "marker", "path", "g", "rect", "text")
    }
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    assert len(drawn) < 20_000
    page = html.render(graph)
    assert "<script" not in page
    assert "<img src=x" not in page
    assert len(graph_picture.tree(graph)) < 1_000
    assert "\x1b" not in text.render(graph)


def test_an_empty_graph_and_one_of_one_node_are_drawn():
    empty = helper.make_model(helper.make_graph([], "g", [], []))
    parsed(picture(Graph("exported", "inference", empty.SerializeToString())))
    parsed(picture(chain(["only"])))


def test_the_tree_lists_each_module_once_under_its_parents(graphs):
    lines = graph_picture.tree(graphs["execution"]).splitlines()
    assert lines[0] == "bert"
    assert sum(line.strip().startswith("embeddings") for line in lines) == 1
    (layer,) = [at for at, line in enumerate(lines) if line.strip() == "layer.1"]
    attention = lines[layer + 1]
    assert attention.startswith("      attention: ")
    assert "FusedMatMul" in attention
