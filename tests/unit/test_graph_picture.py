"""The still picture of a graph: the rows of its map, bands for what is kept, and names that stay text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from onnx import TensorProto, helper
from small_transformers import batch_of, bert

import ortlab
from ortlab.graphs.stages import STAGES, Graph
from ortlab.render import graph_picture, html, text
from ortlab.render.graph_map import COLOURS, graph_map
from ortlab.render.graph_picture import DRAWN, KEPT, ROWS, opened, picture

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


def rects(svg: str) -> list[tuple[str, float]]:
    """Colour and width of each part of a bar."""
    return [(one.get("fill"), float(one.get("width"))) for one in parsed(svg).iter(f"{SVG}rect")]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("stage", STAGES)
def test_the_rows_of_a_picture_have_every_node_once(graphs, stage):
    drawn = graph_map(graphs[stage])
    rows = drawn["rows"]
    shown = opened(rows)
    assert 5 < len(shown) <= ROWS
    closed = set(shown) - {rows[at]["p"] for at in shown}
    count = sum(sum(rows[at][side]["k"].values()) for at in closed for side in ("f", "b"))
    border = [node for node in graphs[stage].model.graph.node if node.op_type == "YieldOp"]
    assert count == graphs[stage].node_count - len(border)
    assert len(border) == drawn["backward"] == (stage in {"gradient", "execution"})
    titles = [rows[at]["t"] for at in shown]
    assert titles.index("embeddings") < titles.index("layer.0") < titles.index("layer.1")


def test_the_picture_is_small_deterministic_and_well_formed(graphs):
    graph = graphs["execution"]
    drawn = picture(graph_map(graph), "a graph")
    again = Graph(graph.stage, graph.mode, graph.serialized, graph.part, graph.traced)
    assert picture(graph_map(again), "a graph") == drawn
    assert len(drawn) < 60_000
    words = texts(drawn)
    assert {"forward", "backward", "kept for backward", "layer.0", "layer.1", "products"} <= set(words)
    bands = [one for one in parsed(drawn).iter(f"{SVG}path") if one.get("stroke")]
    assert len(bands) > 5
    # Text stays within the picture.
    width = float(parsed(drawn).get("viewBox").split()[2])
    for element in parsed(drawn).iter(f"{SVG}text"):
        if element.get("text-anchor") is None:
            assert float(element.get("x")) + 7 * len(element.text) < width


def test_like_layers_have_like_bars_and_marks_take_the_place_of_kinds(graphs):
    graph = graphs["execution"]
    plain = graph_map(graph)
    assert {fill for fill, _ in rects(picture(plain, ""))} >= {COLOURS["0"], COLOURS["1"]}
    names = [name for row in plain["rows"] if "n" in row for name in row["n"]][:4]
    marks = dict.fromkeys(names[:3], "added") | {
        names[3]: "fused",
        "no such node": "moved",
        names[0]: "#d6336c",
    }
    drawn = picture(graph_map(graph, marks=marks), "")
    assert {fill for fill, _ in rects(drawn)} == {COLOURS["added"], COLOURS["fused"], KEPT, "#000", "#fff"}
    assert {"2 added", "1 fused"} <= set(texts(drawn))
    assert "moved" not in drawn


def test_a_long_list_of_layers_is_folded_and_a_wide_model_is_cut():
    parts = ("attention/q", "attention/k", "mlp/up", "mlp/down")
    names = [f"/m/layers.{layer}/{part}/Relu" for layer in range(40) for part in parts]
    rows = graph_map(chain(names))["rows"]
    titles = [rows[at]["t"] for at in opened(rows)]
    assert "layers.1 to 38" in titles
    assert len(titles) <= ROWS

    wide = graph_map(chain([f"/branch_{chr(97 + at // 26)}{chr(97 + at % 26)}/Relu" for at in range(300)]))
    drawn = picture(wide, "")
    assert f"{300 - DRAWN} more modules are not drawn." in texts(drawn)
    assert graph_picture.tree(wide).endswith(f"and {300 - DRAWN} more")


def test_a_graph_from_a_file_has_no_operators_among_its_modules():
    names = [
        "/encoder/MatMul",
        "/encoder/MatMul_Grad/Gemm_1",
        "/encoder/Concat/ConcatReplacement/",
        "/head/Relu",
    ]
    rows = graph_map(chain(names))["rows"]
    assert [row["t"] for row in rows if "n" not in row] == ["encoder", "head"]


def test_names_stay_text_however_they_are_written():
    graph = chain([f"/m/{HOSTILE}/Relu", f"/m/{HOSTILE}/Relu", "", "Relu"])
    drawn = picture(graph_map(graph, marks={HOSTILE: "added"}), HOSTILE)
    root = parsed(drawn)
    assert {element.tag for element in root.iter()} <= {
        f"{SVG}{name}" for name in ("svg", "title", "defs", "pattern", "path", "rect", "text")
    }
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    page = html.render(graph)
    assert "<script" not in page
    assert "<img src=x" not in page
    assert len(graph_picture.tree(graph_map(graph))) < 1_000
    assert "\x1b" not in text.render(graph)


def test_an_empty_graph_and_one_of_one_node_are_drawn():
    empty = helper.make_model(helper.make_graph([], "g", [], []))
    parsed(picture(graph_map(Graph("exported", "inference", empty.SerializeToString())), ""))
    assert "1" in texts(picture(graph_map(chain(["only"])), ""))


def test_the_tree_lists_each_module_once_under_its_parents(graphs):
    lines = graph_picture.tree(graph_map(graphs["execution"])).splitlines()
    (layer,) = [at for at, line in enumerate(lines) if line.strip().startswith("layer.1: ")]
    inner = [line for line in lines[layer + 1 :] if line.startswith("    ")]
    assert any("FusedMatMul" in line for line in inner or lines)
    assert all(re.search(r": \d+ (forward|backward)", line) for line in lines)
