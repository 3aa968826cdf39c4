"""Pages of what a real lab hands out: a small model on ONNX Runtime, no record made up."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import ortlab
from ortlab.records.checks import Check, Report
from ortlab.records.status import Status
from ortlab.render import html, text
from ortlab.render.graph_pages import VALUES_SHOWN
from ortlab.render.lab_pages import lab_page
from ortlab.render.plan_pages import PLANS_SHOWN


@pytest.fixture(scope="module")
def lab():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    inputs = torch.randn(32, 16)
    lab = ortlab.wrap(model, name="tiny <model>")
    lab.step(lambda: model(inputs).square().mean().backward(), n=3)
    yield lab
    lab.unwrap()


def test_the_plan_says_that_its_savings_are_predicted(lab):
    written = text.render(lab.plan())
    # 32 rows of 64 floats of 4 bytes
    assert re.search(r"Gelu\+:1:-1 +- +1 +8\.00 KiB +Recompute GELU in 1 place", written)
    assert "Predicted by ORT for the first batch (input_dim0 = 32" in written
    assert written.endswith(
        f"ORT's own report: print(plan.report), {len(lab.plan().report.splitlines())} lines"
    )
    assert "MemoryInsight Summary" in html.render(lab.plan())


def test_a_plan_without_rows_and_one_with_ten_thousand(lab):
    plan = lab.plan()
    assert "ORT offers no recompute plan" in text.render(dataclasses.replace(plan, rows=()))
    many = dataclasses.replace(plan, rows=plan.rows[:1] * 10_000, recomputed=())
    written = html.render(many)
    assert written.count("<tr>") == PLANS_SHOWN + 1
    assert "9,900 plans that save less" in written


def test_costs_are_shown_once_they_are_known_and_say_where_they_come_from(lab):
    plan = lab.plan()
    assert "off the peak" not in text.render(plan)
    first = dataclasses.replace(
        plan.rows[0],
        peak_saving_bytes=8 * 2**20,
        cost_ms=2.0,
        measured_saving_bytes=6 * 2**20,
        measured_cost_ms=-0.5,
    )
    priced = dataclasses.replace(plan, rows=(first, *plan.rows[1:]))
    dearer = dataclasses.replace(first, peak_saving_bytes=-8.0 * 2**20)
    assert "none" in text.render(dataclasses.replace(plan, rows=(dearer,)))
    assert "-4.00 MiB/ms" not in text.render(dataclasses.replace(plan, rows=(dearer,)))
    assert first.bytes_per_ms == 4 * 2**20
    assert first.measured_bytes_per_ms == float("inf")
    written = text.render(priced)
    for words in (
        "off the peak",
        "8.00 MiB",
        "2.00 ms",
        "4.00 MiB/ms",
        "measured saving",
        "6.00 MiB",
        "free",
    ):
        assert words in written
    assert "predicted by simulating a step, not measured" in html.render(priced)
    table = priced.table()
    assert table["predicted cost [ms]"][0] == 2.0
    assert table["predicted cost [ms]"].isna().sum() == len(plan.rows) + len(plan.recomputed) - 1


def test_the_counts_of_a_graph_add_up_to_its_nodes(lab):
    graph = lab.graph("execution")
    written = text.render(graph)
    operators = written[written.index("Operators") : written.index("Inputs")]
    counts = [int(number) for number in re.findall(r"^\S+ +(\d+) +[\d.]+ %", operators, re.MULTILINE)]
    assert sum(counts) == graph.node_count - 1  # YieldOp stands between the passes, and is in none
    assert f"{graph.node_count} nodes" in written
    assert re.search(r"weight +float +64 x 16", written)
    assert f"digest {graph.digest}" in written


def test_long_lists_of_inputs_are_cut(lab):
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(20))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Wide()
    wide = ortlab.wrap(model)
    wide.step(lambda: model(torch.ones(1, 2)).sum().backward())
    written = text.render(wide.graph("exported"))
    wide.unwrap()
    assert "Inputs: 41" in written
    assert f"{41 - VALUES_SHOWN} more." in written


def test_a_lab_shows_status_changes_and_runs_and_escapes_its_name(lab):
    written = text.render(lab_page(lab))
    assert written.startswith("tiny <model>: Sequential\n\nONNX Runtime: ready.")
    assert "All switches are at their defaults." in written
    assert "#1 ort" in written
    assert "tiny &lt;model&gt;" in html.render(lab_page(lab))
    lab.set(memory_level=1)
    try:
        written = text.render(lab_page(lab))
    finally:
        lab.set(memory_level=0)
    assert re.search(r"memory_level +0 +1 +new session", written)
    assert "rebuild pending; the next step rebuilds the session." in written


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (Status("ort", "not built", "", "", "export"), "not built yet; the next step makes the export"),
        (Status("ort", "ready", "ort", "", ""), "ONNX Runtime: ready."),
        (Status("eager", "ready", "eager", "", ""), "PyTorch eager: ready."),
        (Status("compile", "not built", "", "", ""), "torch.compile: not built yet."),
        (
            Status("ort", "rebuild pending", "ort", "", "graph"),
            "rebuilds the gradient graph and the session.",
        ),
        (
            Status("ort", "fallback", "fallback", "no gradient for Foo", ""),
            "! PYTORCH (fallback): no gradient for Foo",
        ),
        (Status("ort", "unwrapped", "ort", "", ""), "Unwrapped: the model runs in PyTorch"),
    ],
)
def test_the_status_is_one_sentence(status, sentence):
    assert sentence in text.render(status)


def test_the_doctors_report_ends_with_what_to_do():
    good, bad = (
        Check("Python", "ok", "3.11"),
        Check("ONNX Runtime", "fail", "two packages", "pip uninstall onnxruntime"),
    )
    written = text.render(Report((good, bad)))
    assert "cannot train with ONNX Runtime" in written
    assert "! ONNX Runtime: pip uninstall onnxruntime" in written
    assert "FAILED" in written
    assert "can train with ONNX Runtime." in text.render(Report((good,)))
