"""%ort_messages over a real build at INFO."""

from __future__ import annotations

import pytest


@pytest.fixture
def talking_shell(net_shell):
    net_shell.run("%ort_set log_level=INFO")
    net_shell.run(
        "%%ort_step -n 2\nloss = nn.functional.cross_entropy(net(inputs), labels)\nloss.backward()\n"
    )
    return net_shell


def test_it_returns_messages_and_shows_them_by_run(talking_shell):
    shell, lab = talking_shell, talking_shell.user_ns["lab"]
    said = shell.run("%ort_messages")
    assert list(said) == list(lab.messages)
    assert "Run 1: " in shell.formats(said)["text/plain"]
    assert "<details><summary>Run 1: " in shell.formats(said)["text/html"]


def test_its_arguments_choose(talking_shell):
    shell = talking_shell
    shell.run("number = 1")
    assert {one.source for one in shell.run("%ort_messages --run $number --source exporter")} == {"exporter"}
    (graph,) = shell.run('%ort_messages --level info --stage export --text "Exported graph: graph("')
    assert graph.text.startswith("Exported graph: graph(")
    assert len(shell.run("%ort_messages --run 0")) == 0
    assert len(shell.run("%ort_messages --level ERROR")) == 0
    assert len(shell.run("%ort_messages --source 'ONNX Runtime' --lab lab")) == 0
