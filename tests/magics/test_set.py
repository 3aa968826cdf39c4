"""%ort_set, %ort_options and %ort_doctor."""

from __future__ import annotations

import pytest

from ortlab.options.options import Options, switches


def test_set_changes_options_and_engine_and_returns_the_lab(net_shell):
    net_shell.run("INFO = 'surprise'\nlevel = 2")
    result = net_shell.run(
        "%ort_set memory_level=$level log_level=INFO engine=eager save_onnx_path='my graphs'"
    )
    lab = net_shell.user_ns["lab"]
    assert result is lab
    assert lab.engine == "eager"
    assert lab.options == Options(memory_level=2, log_level="INFO", save_onnx_path="my graphs")


def test_a_list_of_literals_is_a_value(net_shell):
    net_shell.run("%ort_set memory_plan=['Gelu+:1:-1', 'Gemm+:1:-1']")
    assert net_shell.user_ns["lab"].options.memory_plan == ("Gelu+:1:-1", "Gemm+:1:-1")


def test_braces_and_dollars_are_not_expanded(net_shell):
    net_shell.run("folder = 'runs'")
    net_shell.run("%ort_set save_onnx_path={folder}")
    assert net_shell.user_ns["lab"].options.save_onnx_path == "{folder}"
    net_shell.run("%ort_set save_onnx_path='$folder'")
    assert net_shell.user_ns["lab"].options.save_onnx_path == "$folder"


def test_options_lists_every_switch_with_its_help(net_shell):
    net_shell.run("%ort_set memory_level=1")
    listed = net_shell.run("%ort_options")
    assert listed.names == tuple(one.name for one in switches())
    forms = net_shell.formats(listed)
    for one in switches():
        assert one.name in forms["text/plain"]
        assert one.name in forms["text/html"]
    assert "1 (default 0)" in forms["text/plain"]
    assert "1 (default 0)" in forms["text/html"]
    table = listed.table()
    assert table.loc["memory_level", "value"] == 1
    assert table.loc["conv_algo_search", "missing"].startswith("conv_algo_search needs an NVIDIA GPU")


def test_options_by_name_keep_their_order(net_shell):
    listed = net_shell.run("%ort_options save_onnx memory_level")
    assert listed.names == ("save_onnx", "memory_level")
    assert "log_level" not in net_shell.formats(listed)["text/html"]


@pytest.mark.slow
def test_doctor_examines_the_installation(shell):
    report = shell.run("%ort_doctor")
    assert report.ok
    forms = shell.formats(report)
    for check in report.checks:
        assert check.name in forms["text/plain"]
        assert check.name in forms["text/html"]
