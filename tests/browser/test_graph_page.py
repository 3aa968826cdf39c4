"""The page of a graph in Chromium, in a sandboxed frame as in a notebook: it boots, answers, and asks for nothing.

The graph is that of a real build. Both ends of the range of netron are tested; one that is not installed is
unpacked into a temporary folder.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
import transformers
from playwright.sync_api import Error

import ortlab
from ortlab.graphs.stages import Graph
from ortlab.graphs.viewer import SANDBOX, document, reduction

NETRONS = ("8.9.0", "9.3.3")
"""The oldest and the newest netron of the range in pyproject.toml."""

OUTSIDE = """<!DOCTYPE html><html><body style="margin: 0">
<iframe id="graph" sandbox="{sandbox}" style="width: 1180px; height: 780px; border: 0"></iframe><script>
window.told = [];
addEventListener('message', ({{ source, data }}) => {{ if (source === graph.contentWindow) told.push(data); }});
window.ask = (message) => graph.contentWindow.postMessage(message, '*');
</script></body></html>"""

SIDE_BAR_IS_OPEN = "document.getElementById('sidebar').style.opacity === '1'"


@pytest.fixture(scope="module")
def training() -> Graph:
    """The execution graph of a training build of BERT."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    model = transformers.BertForMaskedLM(config)
    lab = ortlab.wrap(model)
    ids = torch.randint(0, 64, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    graph = lab.graph("execution")
    lab.unwrap()
    return graph


@pytest.fixture(scope="session", params=NETRONS)
def netron(request, tmp_path_factory) -> Path:
    """The folder of one version of netron."""
    if importlib.metadata.version("netron") == request.param:
        import netron

        return Path(netron.__file__).parent
    folder = tmp_path_factory.mktemp(f"netron-{request.param}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", folder, f"netron=={request.param}"], check=True)
    return folder / "netron"


class Shown:
    """A page in its frame, as the notebook around it sees it."""

    def __init__(self, tab, requests: list[str]) -> None:
        self.tab = tab
        self.requests = requests
        self.frame = tab.frames[1]
        self.inside = tab.frame_locator("#graph")

    def told(self, kind: str, count: int = 1) -> dict:
        """Wait for the message of a kind, the `count`th of it, and return it."""
        self.tab.wait_for_function(
            "([kind, count]) => told.filter(({ ortlab }) => ortlab === kind).length >= count"
            " || told.some(({ ortlab }) => ortlab === 'failed')",
            arg=[kind, count],
            timeout=60_000,
        )
        found = [message for message in self.tab.evaluate("told") if message["ortlab"] in (kind, "failed")]
        assert found[-1]["ortlab"] == kind, found
        return found[count - 1]

    def becomes(self, condition: str) -> None:
        """Wait until a condition holds in the page, asked from outside: its policy forbids to eval one that waits."""
        for _ in range(600):
            try:
                if self.frame.evaluate(condition):
                    return
            except Error as error:
                if (
                    "context was destroyed" not in error.message
                ):  # the frame has gone on to its page meanwhile
                    raise
            self.tab.wait_for_timeout(100)
        raise AssertionError(f"It did not come to {condition} in a minute.")

    def ask(self, **message) -> None:
        self.tab.evaluate("(message) => ask(message)", message)

    def texts(self, selector: str) -> list[str]:
        return self.inside.locator(selector).all_text_contents()


@pytest.fixture
def show(chromium):
    """Return a context that shows a page; at its end no error was said and nothing was asked of a network."""

    @contextmanager
    def showing(page, *, scheme: str = "light", expected: str = "") -> Iterator[Shown]:
        assert page.html, page.refused
        complaints: list[str] = []
        requests: list[str] = []
        context = chromium.new_context(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
        tab = context.new_page()
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on(
            "console",
            lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        tab.set_content(OUTSIDE.format(sandbox=SANDBOX))
        tab.evaluate("(source) => { graph.srcdoc = source; }", page.html)
        try:
            yield Shown(tab, requests)
        finally:
            context.close()
        assert [words for words in complaints if not expected or expected not in words] == []
        assert [address for address in requests if not address.startswith("blob:")] == []

    return showing


def test_the_page_of_each_netron_draws_searches_and_tells_what_is_selected(training, netron, show):
    page = document(training, group="module", netron=netron)
    names = [node.name for node in training.model.graph.node]
    softmax = [name for name in names if name.endswith("Softmax")]
    with show(page) as shown:
        assert shown.told("ready")["nodes"] == page.drawn
        assert shown.inside.locator("g.graph-node").count() == page.drawn
        # Netron's lock by date, question about cookies and dialogs.
        assert shown.frame.evaluate("document.body.className").split() == ["default", "ortlab-ready"]
        shown.ask(ortlab="search", text="layer.1 softmax")
        found = shown.told("found")
        expected = [name for name in names if "layer.1" in name and "softmax" in name.lower()]
        assert set(expected) <= set(found["names"])
        assert shown.texts("#ortlab-found button")
        shown.inside.locator("#ortlab-search").press("Enter")
        assert shown.told("selected")["names"] == found["names"][:1]
        # What is in a group is opened; the names there are those of this layer.
        wanted = next(name for name in softmax if "layer.2" in name)
        shown.ask(ortlab="select", names=[wanted])
        assert shown.told("shown")["missing"] == []
        chosen = shown.inside.locator("g.graph-node.select")
        assert chosen.count() == 1
        assert wanted in chosen.locator("title").all_text_contents()
        chosen.locator(".node-item").first.click()
        assert shown.told("selected", 2)["names"] == [wanted]


def test_the_side_bar_is_about_what_is_selected_from_outside(training, netron, show):
    names = [node.name for node in training.model.graph.node]
    with show(document(training, around=names[0], hops=3, netron=netron)) as shown:
        shown.told("ready")
        shown.inside.locator("g.graph-node.select .node-item").first.click()
        sidebar = shown.inside.locator("#sidebar")
        sidebar.get_by_text(names[0], exact=True).first.wait_for()
        drawn = shown.frame.evaluate(
            "[...document.querySelectorAll('g.graph-node title')].map((t) => t.textContent)"
        )
        other = next(name for name in names[1:] if name in drawn)
        shown.ask(ortlab="select", names=[other])
        sidebar.get_by_text(other, exact=True).first.wait_for()
        assert sidebar.get_by_text(names[0], exact=True).count() == 0
        assert shown.frame.evaluate(SIDE_BAR_IS_OPEN)
        shown.ask(ortlab="select", names=[])
        assert shown.told("shown", 2) == {"ortlab": "shown", "missing": []}
        assert not shown.frame.evaluate(SIDE_BAR_IS_OPEN)
        assert shown.inside.locator("g.graph-node.select").count() == 0
        # Emptied once it has slid away, and open again for the next node.
        shown.becomes("!document.getElementById('sidebar-content').textContent")
        shown.inside.locator("g.graph-node .node-item").first.click()
        shown.becomes(SIDE_BAR_IS_OPEN)


def test_a_group_stands_for_its_nodes(training, show):
    page = document(training, group="module", colours={})
    names = {node.name for node in training.model.graph.node}
    with show(page) as shown:
        shown.told("ready")
        group = shown.inside.locator("g.graph-node", has_text="ƒ").first
        group.locator(".node-item").first.click()
        members = shown.told("selected")["names"]
        assert len(members) > 1
        assert set(members) <= names


def test_nodes_are_marked_in_their_groups_and_out_of_them(training, show):
    names = [node.name for node in training.model.graph.node]
    softmax = [name for name in names if name.endswith("Softmax")]
    page = document(training, group="module", colours={softmax[0]: "added", softmax[1]: "#1a7f37"})
    with show(page, scheme="dark") as shown:
        shown.told("ready")
        assert shown.inside.locator(".node-border.ortlab-added").count() == 1
        assert shown.texts("text.ortlab-mark") == ["+added"]
        shown.ask(ortlab="colour", colours={softmax[2]: "moved"})
        shown.ask(ortlab="select", names=[softmax[2]])
        assert shown.told("shown")["missing"] == []
        assert shown.inside.locator(".node-border.ortlab-added").count() == 0
        assert shown.inside.locator(".graph-node.select .node-border.ortlab-moved").count() == 1


def test_what_is_asked_before_the_graph_is_drawn_is_done_then(training, show):
    name = training.model.graph.node[0].name
    with show(document(training, around=name, hops=1)) as shown:
        shown.becomes("document.getElementById('ortlab-page') || window.ortlab")
        shown.ask(ortlab="select", names=[name, "elsewhere"])
        shown.told("ready")
        assert shown.told("shown")["missing"] == ["elsewhere"]
        assert shown.inside.locator("g.graph-node.select").count() == 1
        assert shown.texts("#ortlab-status") == ["1 of 2 nodes are not in this view."]


def test_the_page_follows_a_theme(training, show):
    background = "getComputedStyle(document.getElementById('target')).backgroundColor"
    with show(document(training, around=training.model.graph.node[0].name)) as shown:
        shown.told("ready")
        assert shown.inside.locator("g.graph-node.select").count() == 1  # the node that is looked around
        light = shown.frame.evaluate(background)
        shown.ask(ortlab="theme", theme="dark")
        shown.becomes(f"{background} !== '{light}'")


def test_hostile_names_run_no_script(show):
    hostile = "</script><img src=x onerror=parent.postMessage({ortlab:'ran'},'*')>\"'&<b>é🙂" + "x" * 10_000
    make = onnx.helper.make_node
    nodes = [
        make("Relu", ["x"], [hostile], name=hostile, doc_string=f"[a](javascript:alert(1)) {hostile}"),
        make(
            "Nothing", [hostile], ["y"], name="two", domain="<img src=x onerror=alert(1)>", doc_string=hostile
        ),
    ]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        hostile,
        [value("x", 1, ["<img src=x onerror=alert(1)>", 4])],
        [value("y", 1, [4])],
        doc_string=hostile,
    )
    model = onnx.helper.make_model(graph, doc_string=hostile)
    onnx.helper.set_model_props(model, {"license_url": "'><img src=x onerror=alert(1)>", "author": hostile})
    page = document(Graph("exported", "inference", model.SerializeToString()), colours={hostile: hostile})
    with show(page) as shown:
        shown.told("ready")
        shown.ask(ortlab="search", text="<img")
        assert shown.told("found")["names"][0] == hostile
        shown.inside.locator("#ortlab-search").press("Enter")
        assert shown.told("selected")["names"] == [hostile]
        for node in range(2):  # its properties in the side bar, with its description
            shown.inside.locator("g.graph-node .node-item").nth(node).click()
            shown.tab.wait_for_timeout(300)
        for button in ("#sidebar-target-button", "#sidebar-model-button"):
            shown.inside.locator(button).click()
            shown.tab.wait_for_timeout(300)
        assert not [message for message in shown.tab.evaluate("told") if message["ortlab"] == "ran"]
        assert shown.frame.evaluate("document.querySelectorAll('img').length") == 0


def test_the_frame_reaches_nothing_of_the_notebook(training, show):
    with show(document(training, around=training.model.graph.node[0].name)) as shown:
        shown.told("ready")
        assert shown.frame.evaluate("origin") == "null"
        reached = (
            "(() => { try { return String(parent.document.title); } catch (error) { return error.name; } })()"
        )
        assert shown.frame.evaluate(reached) == "SecurityError"
        policy = shown.frame.evaluate("document.querySelector('meta[http-equiv]').content")
        assert "default-src 'none'" in policy
        assert "connect-src 'none'" in policy
        assert "unsafe-eval" not in policy


def test_messages_of_others_are_not_taken(training, show):
    name = training.model.graph.node[0].name
    with show(document(training, around=name)) as shown:
        shown.told("ready")
        # From the frame itself, which is not its parent.
        shown.frame.evaluate("(text) => postMessage({ ortlab: 'search', text }, '*')", name)
        shown.tab.wait_for_timeout(300)
        assert not [message for message in shown.tab.evaluate("told") if message["ortlab"] == "found"]


def test_a_layout_that_takes_too_long_is_given_up(training, show, monkeypatch):
    from ortlab.graphs.viewer import document as module

    monkeypatch.setattr(sys.modules[module.__module__], "PATIENCE_MS", 0)
    for name in ("PLACED_AT_ONCE", "PLACED_WITH_PATIENCE", "PLACED_AT_ALL"):
        monkeypatch.setattr(reduction, name, (10**6, 10**9))
    # Every node is read by every later one: more than the layout can do in the 2.5 s before netron asks.
    make = onnx.helper.make_node
    nodes = [make("Sum", [f"x{before}" for before in range(at)] or ["x"], [f"x{at}"]) for at in range(400)]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [onnx.ValueInfoProto(name="x")], []))
    page = document(Graph("exported", "inference", model.SerializeToString()), group="none")
    with show(page) as shown:
        shown.tab.wait_for_function("told.length > 1", timeout=60_000)
        begun, told = shown.tab.evaluate("told")
        assert begun == {"ortlab": "begun"}
        assert told == {"ortlab": "failed", "reason": "The nodes could not be placed: it took too long."}
        assert "The table above it holds the same graph" in shown.frame.evaluate("document.body.innerText")
        shown.frame.evaluate("1 + 1")  # the tab is alive


@pytest.mark.parametrize("length", [200, 1_100])
def test_without_a_worker_only_what_is_placed_soon_is_drawn(show, length):
    make = onnx.helper.make_node
    nodes = [make("Relu", [f"x{at}"], [f"x{at + 1}"]) for at in range(length)]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [onnx.ValueInfoProto(name="x0")], []))
    page = document(Graph("exported", "inference", model.SerializeToString()), group="none")
    strict = replace(page, html=page.html.replace("worker-src blob:", "worker-src 'none'"))
    with show(strict, expected="worker-src 'none'") as shown:
        shown.tab.wait_for_function("told.length > 1", timeout=60_000)
        told = shown.tab.evaluate("told")[1]
        if length == 200:
            assert told["nodes"] == length
        else:
            assert told["ortlab"] == "failed"
            assert "need a worker" in told["reason"]


def test_a_menu_without_files_and_a_picture_that_is_saved(training, show):
    with show(document(training, around=training.model.graph.node[0].name, hops=1)) as shown:
        shown.told("ready")
        shown.inside.locator("#menu-button").click()
        labels = " ".join(shown.texts("#menu .menu-label"))
        assert "Export as SVG" in labels
        assert "Open" not in labels
        assert "Report" not in labels
        with shown.tab.expect_download() as download:
            shown.inside.locator("#menu .menu-command", has_text="Export as SVG").click()
        picture = Path(download.value.path()).read_text(encoding="utf-8")
        assert download.value.suggested_filename == "execution.svg"
        assert picture.startswith("<svg")
        assert "stroke:" in picture  # drawn as on the page, without its style sheet
