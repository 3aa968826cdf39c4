"""Magic lines as people write them: comments, quotes, backslashes; for every magic that is registered."""

from __future__ import annotations

import inspect
import re

import pytest
from IPython.core.error import UsageError

from .conftest import NET, STEP

COMMENT = """   # the model's "first (try), and what does it [cost?"""

# Each starts processes where it runs; they are tested in files of their own.
STARTS_PROCESSES = {"%ort_doctor", "%ort_cluster"}


def registered(shell) -> list[str]:
    """Every magic of ortlab, with its percent signs."""
    magics = shell.magics_manager.magics
    return [
        sign + name
        for kind, sign in (("line", "%"), ("cell", "%%"))
        for name in sorted(magics[kind])
        if name.startswith("ort_")
    ]


def refusal(shell, line: str) -> str:
    with pytest.raises(UsageError) as caught:
        shell.run(line + ("\npass" if line.startswith("%%") else ""))
    return str(caught.value)


def outcome(shell, cell: str) -> object:
    """The type of what a cell returns, or the words in which it is refused."""
    try:
        return type(shell.run(cell))
    except UsageError as error:
        return str(error)


def test_every_magic_takes_a_comment_for_a_comment(shell):
    found = registered(shell)
    assert len(found) >= 28
    for magic in found:
        without = refusal(shell, f"{magic} --nonsense")
        assert refusal(shell, f"{magic} --nonsense{COMMENT}") == without, magic


def test_the_example_of_every_magic_may_have_a_comment(shell):
    # Nothing is wrapped, so each refuses for a reason of its own, or says what it says without a model.
    shell.run("step = model = batch = lengths = make_batch = None")
    tried = set()
    for magic in registered(shell):
        if magic in STARTS_PROCESSES:
            continue
        kind = "cell" if magic.startswith("%%") else "line"
        text = inspect.getdoc(shell.magics_manager.magics[kind][magic.lstrip("%")])
        examples = re.findall(r"(?m)^ {4}(?:\w+ = )?(%%?ort_\w+.*)$", text.split("Example::")[1])
        for example in examples:
            if not example.startswith(f"{magic} ") and example != magic:
                continue
            tail = "\npass" if kind == "cell" else ""
            assert outcome(shell, example + tail) == outcome(shell, example + COMMENT + tail), example
            tried.add(magic)
    assert tried == set(registered(shell)) - STARTS_PROCESSES


def test_the_first_minute_with_a_comment_behind_each_line(shell):
    shell.run(NET)
    shell.run("lab = %ort_wrap net --no-panel   # the net's lab; does it run?")
    run = shell.run(STEP.replace("-n 4", "-n 3   # a warm-up, and two more"))
    assert len(run.steps) == 3
    again = shell.run("%ort_rerun engine=eager -n 2  # and on plain PyTorch")
    assert (again.executed_by, len(again.steps)) == ("eager", 2)
    shell.run("%ort_set memory_level=1        # or tick it in the panel")
    assert shell.user_ns["lab"].options.memory_level == 1
    assert shell.run("%ort_compare  # all of them").baseline.number == 1
    shell.run("lab.unwrap()")


def test_a_hash_in_a_value_is_no_comment(net_shell, tmp_path):
    net_shell.user_ns["folder"] = folder = tmp_path / "graphs #1"
    folder.mkdir()
    net_shell.run(f'%ort_set save_onnx=True save_onnx_path="{folder}"   # "not this"')
    assert net_shell.user_ns["lab"].options.save_onnx_path == str(folder)
    net_shell.run("%ort_set save_onnx_prefix=net#2 # that")
    assert net_shell.user_ns["lab"].options.save_onnx_prefix == "net#2"


def test_an_expression_with_a_hash_in_it_is_refused_as_an_expression(shell):
    shell.run('models = {"a # b": 1}')
    said = refusal(shell, '%ort_wrap models["a # b"]   # the first')
    assert said.startswith("'models[")
    assert "A magic evaluates no expressions" in said


def test_a_backslash_joins_lines(net_shell):
    net_shell.run("%ort_set memory_level=1 \\\n   opset=16  # both")
    options = net_shell.user_ns["lab"].options
    assert (options.memory_level, options.opset) == (1, 16)
    net_shell.run("lab = %ort_set memory_level=0 \\\n   opset=17")
    assert net_shell.user_ns["lab"].options.memory_level == 0
