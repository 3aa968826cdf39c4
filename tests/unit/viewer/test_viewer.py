"""Graphs of a real build, reduced and put into a page; what the page does is tested in Chromium (tests/browser)."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from small_transformers import batch_of, bert

import ortlab
from ortlab.errors import BuildError, InstallError, OptionError
from ortlab.graphs.nodes import node_names
from ortlab.graphs.stages import Graph
from ortlab.graphs.viewer import document
from ortlab.graphs.viewer.bundle import assemble, bundle
from ortlab.graphs.viewer.document import lean
from ortlab.graphs.viewer.grouping import grouped, in_backward, in_order, reads
from ortlab.graphs.viewer.reduction import (
    PLACED_AT_ALL,
    PLACED_AT_ONCE,
    STUB,
    cost,
    modules_of,
    without_long_edges,
)

LAYERS = 4


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    """The gradient and the execution graph of a training build of BERT."""
    torch.manual_seed(0)
    model = bert(layers=LAYERS, width=64, drop=0.1, intermediate_size=64)
    lab = ortlab.wrap(model)
    model(**batch_of(2, 16)).loss.backward()
    built = {stage: lab.graph(stage) for stage in ("gradient", "execution")}
    lab.unwrap()
    return built


def parts(html: str) -> dict[str, bytes]:
    found = re.findall(r'<script type="text/plain" id="ortlab-(\w+)">([\w+/=]+)</script>', html)
    return {name: gzip.decompress(base64.b64decode(text)) for name, text in found}


def of_nodes(*nodes: onnx.NodeProto, inputs: str = "x") -> Graph:
    graph = onnx.helper.make_graph(list(nodes), "g", [onnx.ValueInfoProto(name=inputs)], [])
    return Graph("exported", "inference", onnx.helper.make_model(graph).SerializeToString())


def chain(count: int, name: str = "node {}") -> Graph:
    make = onnx.helper.make_node
    return of_nodes(
        *(make("Relu", [f"x{n}" if n else "x"], [f"x{n + 1}"], name=name.format(n)) for n in range(count))
    )


@pytest.mark.parametrize("stage", ["gradient", "execution"])
def test_groups_hold_every_node_once_and_depend_on_each_other_without_circles(graphs, stage):
    graph = graphs[stage]
    model = lean(graph.model)
    made, groups = grouped(model, modules_of(graph), in_backward(model.graph.node))
    names = [node.name for node in made.graph.node if node.domain != "ortlab.module"]
    names += [name for group in groups for name in group.nodes]
    assert sorted(names) == sorted(node_names(graph.model.graph))
    assert in_order(made.graph.node) == list(made.graph.node)
    assert len(made.graph.node) < len(model.graph.node) / 3
    # What a group reads and what it hands on is what its nodes read from others and others from them.
    functions = {function.name: function for function in made.functions}
    of_group = {group.name: group for group in groups}
    nodes = {node.name: node for node in model.graph.node}
    for call in made.graph.node:
        if call.domain == "ortlab.module":
            inside = [nodes[name] for name in of_group[call.name].nodes]
            own = {output for node in inside for output in node.output}
            weights = {tensor.name for tensor in model.graph.initializer}
            read = {name for node in inside for name in reads(node)} - own - weights
            assert set(call.input) == read
            assert set(call.output) <= own
            assert len(functions[call.op_type].input) == len(call.input)


@pytest.mark.parametrize("stage", ["gradient", "execution"])
def test_layers_that_compute_the_same_share_a_function_and_keep_their_names(graphs, stage):
    graph = graphs[stage]
    model = lean(graph.model)
    made, groups = grouped(model, modules_of(graph), in_backward(model.graph.node))
    functions = {function.name: function for function in made.functions}
    by_function: dict[str, list] = {}
    for group in groups:
        by_function.setdefault(group.function, []).append(group)
    shared = [found for found in by_function.values() if len(found) > 1]
    assert shared
    operators = {node.name: node.op_type for node in model.graph.node}
    for first, *others in shared:
        body = [node for node in functions[first.function].node if node.op_type != "Constant" or node.name]
        assert tuple(node.name for node in body) == first.nodes
        for other in others:
            assert [operators[name] for name in other.nodes] == [operators[name] for name in first.nodes]
            assert len(other.values) == len(first.values)
            assert set(other.nodes).isdisjoint(first.nodes)
    layers = {f"bert.encoder.layer.{number}" for number in range(LAYERS)}
    assert layers <= {group.name for group in groups} or any(
        layer in name for layer in layers for name in modules_of(graph).values()
    )


def test_backward_is_what_comes_after_the_yield(graphs):
    nodes = lean(graphs["execution"].model).graph.node
    late = in_backward(nodes)
    assert not any(flag for node, flag in zip(nodes, late, strict=True) if node.op_type == "YieldOp")
    assert all(flag for node, flag in zip(nodes, late, strict=True) if "_Grad/" in node.name)
    assert not any(flag for node, flag in zip(nodes, late, strict=True) if node.op_type == "Softmax")


def test_parameters_and_their_gradients_are_no_nodes_of_their_own(graphs):
    model = lean(graphs["gradient"].model)
    assert {value.name for value in model.graph.input} == {"input_ids", "labels"}
    assert {value.name for value in model.graph.output} == set()
    held = {tensor.name for tensor in model.graph.initializer}
    assert any(name.endswith("encoder.layer.0.attention.self.query.weight") for name in held)


def test_weights_are_left_out_and_the_graph_itself_keeps_them():
    weight = onnx.numpy_helper.from_array(np.ones((300, 300), np.float32), "w")
    small = onnx.numpy_helper.from_array(np.arange(4, dtype=np.int64), "sizes")
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
        onnx.helper.make_node("Reshape", ["y", "sizes"], ["z"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [onnx.ValueInfoProto(name="x")], [], [weight, small])
    whole = Graph("exported", "inference", onnx.helper.make_model(graph).SerializeToString())
    shown = lean(whole.model)
    tensors = {tensor.name: tensor for tensor in shown.graph.initializer}
    assert list(tensors["w"].dims) == [300, 300]
    assert not tensors["w"].raw_data
    assert tensors["sizes"].raw_data == small.raw_data
    assert len(whole.model.graph.initializer[0].raw_data) == 300 * 300 * 4
    assert len(parts(document(whole).html)["model"]) < 2_000


def test_a_page_is_the_same_bytes_each_time_and_within_its_budget(graphs):
    graph = graphs["execution"]
    pages = [document(graph, group="module").html for _ in range(2)]
    script = (
        "import sys; from pathlib import Path; from ortlab.graphs.stages import Graph; "
        "from ortlab.graphs.viewer import document;"
        "print(document(Graph('execution', 'training', Path(sys.argv[1]).read_bytes()), group='module').html, end='')"
    )
    assert pages[0] == pages[1]
    assert len(pages[0]) - len(parts_text(pages[0])) < 400_000
    assert len(pages[0]) < 400_000
    other = elsewhere(script, graph)
    assert other == pages[0]


def parts_text(html: str) -> str:
    return re.search(r'id="ortlab-model">([\w+/=]+)<', html)[1]


def elsewhere(script: str, graph: Graph) -> str:
    """Run in a process of its own, with another seed for hashes."""
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = graph.save(Path(folder) / "graph.onnx")
        environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[3])}
        command = [sys.executable, "-c", script, str(file)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_page_carries_the_notice_and_nothing_that_netron_does_besides():
    page = json.loads(parts(document(chain(3)).html)["page"])
    assert "Copyright (c) Lutz Roeder" in page["script"]
    assert "Permission is hereby granted, free of charge" in page["script"]
    for word in ("ipinfo.io", "Please update", "This app uses cookies", "180"):
        assert word not in page["script"].replace("0x180", "") or word == "180"
    assert "browser.Host" not in page["script"]


def test_small_graphs_are_drawn_whole_and_large_ones_are_reduced_in_words(graphs):
    small = document(chain(30))
    assert (small.nodes, small.drawn, small.reduced, small.refused) == (30, 30, "", "")
    graph = graphs["gradient"]
    large = document(graph)
    assert not cost(lean(graph.model).graph.node).within(PLACED_AT_ONCE)
    assert large.nodes == graph.node_count
    assert large.drawn < graph.node_count / 3
    assert re.match(r"\d+ groups by module hold [\d,]+ of the [\d,]+ nodes", large.reduced)


def test_a_graph_without_modules_is_cut_into_parts():
    page = document(chain(2_500, "{}"))
    assert 0 < page.drawn < 100
    facts = json.loads(parts(page.html)["facts"])
    assert sorted(at for group in facts["groups"].values() for at in group["nodes"]) == list(range(2_500))


def test_what_the_browser_cannot_place_is_refused_with_numbers():
    page = document(chain(PLACED_AT_ALL[0] + 1, "{}"), group="none")
    assert (page.html, page.drawn) == ("", 0)
    assert f"{PLACED_AT_ALL[0] + 1:,} nodes" in page.refused
    assert 'group="module"' in page.refused


def test_long_edges_are_cut_and_counted(graphs):
    model = lean(graphs["gradient"].model)
    short, cut = without_long_edges(model, 10_000)
    assert cut > 0
    assert cost(short.graph.node).span <= 10_000 < cost(model.graph.node).span
    stubs = [name for node in short.graph.node for name in node.input if name.startswith(STUB)]
    assert len(stubs) == cut
    assert {name.removeprefix(STUB) for name in stubs} <= {
        name for node in model.graph.node for name in node.output
    }
    page = document(graphs["gradient"], group="none")
    assert "long edges are cut" in page.reduced


def test_a_neighbourhood_is_what_is_within_the_hops(graphs):
    graph = graphs["execution"]
    softmax = next(node.name for node in graph.model.graph.node if node.op_type == "Softmax")
    alone, near = (document(graph, around=softmax, hops=hops) for hops in (0, 1))
    assert alone.drawn == 1
    model = onnx.load_model_from_string(parts(near.html)["model"])
    by_name = {node.name: node for node in model.graph.node}
    centre = by_name[softmax]
    for node in model.graph.node:
        assert node is centre or set(node.output) & reads(centre) or set(centre.output) & reads(node)
    assert near.drawn == len(model.graph.node) > 2
    assert (
        f"{near.drawn} of {graph.node_count:,} nodes are drawn: those within 1 hop of {softmax}"
        in near.reduced
    )


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"around": "Softmx"}, "The graph has no node 'Softmx'"),
        ({"around": "node 1", "hops": -1}, "0 hops or more, not -1"),
        ({"group": "layer"}, "not grouped by 'layer'"),
    ],
)
def test_bad_wishes_are_refused(wanted, said):
    with pytest.raises(OptionError, match=said):
        document(chain(3), **wanted)


def test_nodes_in_a_circle_are_named():
    make = onnx.helper.make_node
    with pytest.raises(BuildError, match=r"The node (one|two) needs what is made of its own result"):
        document(of_nodes(make("Add", ["x", "b"], ["a"], name="one"), make("Relu", ["a"], ["b"], name="two")))


def test_names_are_made_unique_and_nothing_in_them_leaves_its_place():
    hostile = "</script><img src=x onerror=alert(1)>\"'&" + "é🙂" + "x" * 10_000
    make = onnx.helper.make_node
    graph = of_nodes(
        make("Relu", ["x"], ["a"], name=hostile, doc_string=hostile),
        make("Relu", ["a"], ["b"], name=hostile),
        make("Relu", ["b"], [hostile]),
    )
    assert node_names(graph.model.graph) == [hostile, f"{hostile} (2)", f"{hostile} (3)"]
    html = document(graph, colours={hostile: hostile}).html
    assert "onerror" not in html
    assert html.count("</script>") == 4


def test_the_page_is_assembled_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundle.cache_clear()
    try:
        made = bundle()
        (kept,) = (tmp_path / "ortlab" / "viewer").glob("*.json")
        assert made.version in kept.name
        bundle.cache_clear()
        assert bundle() == made
        kept.write_text("{", encoding="utf-8")  # as after a full disk
        bundle.cache_clear()
        assert bundle() == made
    finally:
        bundle.cache_clear()


def test_a_netron_that_is_written_in_another_way_is_refused(tmp_path):
    import netron

    package = Path(netron.__file__).parent
    for file in [*package.glob("*.js"), *package.glob("*.css"), package / "index.html"]:
        if not file.name.endswith("-metadata.json"):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "text.js").unlink()
    with pytest.raises(InstallError, match=r"The page of netron 9\.9\.9 cannot be assembled"):
        assemble(tmp_path, "9.9.9")
    (tmp_path / "text.js").write_text("export default class {}\n", encoding="utf-8")
    with pytest.raises(InstallError, match="export default class"):
        assemble(tmp_path, "9.9.9")
