"""The line that says how far a call is: its words, its fraction, and what a kernel sends of it."""

from __future__ import annotations

import time

import pytest
from jupyter_client.manager import start_new_kernel

from ortlab.runs.progress import REDRAW_SECONDS, Progress

PATIENCE_SECONDS = 120

STEPS = """\
import torch, ortlab, time
model = torch.nn.Linear(4, 2)
x = torch.randn(3, 4)

def step():
    global calls
    calls += 1
    if calls % 2: print("call", calls)
    time.sleep(0.05)
    loss = model(x).square().mean()
    loss.backward()
    return loss

calls, lab = 0, ortlab.wrap(model)
run = lab.step(step, n=20)
print("done")
"""


@pytest.fixture
def drawn():
    return []


@pytest.fixture
def line(drawn):
    return Progress(lambda words, fraction: drawn.append((words, fraction)))


def test_steps_say_number_loss_and_time(line, drawn):
    with line.task(2000, evenly=True, show=False) as task:
        task.step(0.5, 12.0)
        assert drawn == [("Step 1 of 2,000, loss 0.50000, 12.0 ms a step", 1 / 2000)]
        task.step(None, 14.0)  # too soon after the other to be drawn
        assert len(drawn) == 1
        time.sleep(REDRAW_SECONDS)
        task.step(0.25, 16.0)  # with the mean of those since the last drawing
        assert drawn[-1] == ("Step 3 of 2,000, loss 0.25000, 15.0 ms a step", 3 / 2000)
    assert drawn[-1] == ("", 1.0)


def test_a_task_within_a_task_is_a_part_of_it(line, drawn):
    with line.task(4, what="Sweep", show=False) as sweep:
        sweep.begin("Run 2 of 4 (eager)", 1)
        with line.task(10, evenly=True, show=False) as steps:
            line.stage("Exporting the model to ONNX", 0.0)
            assert drawn[-1] == ("Run 2 of 4 (eager): Exporting the model to ONNX", 0.25)
            line.stage("", 1.0)
            for _ in range(5):
                steps.step(1.0, 2.0)
            time.sleep(REDRAW_SECONDS)
            steps.step(1.0, 2.0)
        words, fraction = drawn[-1]
        assert words == "Run 2 of 4 (eager): Step 6 of 10, loss 1.0000, 2.00 ms a step"
        assert fraction == pytest.approx((1 + 0.6) / 4)
        assert ("", 1.0) not in drawn  # the outer one goes on
    assert drawn[-1] == ("", 1.0)


def test_time_left_is_told_where_units_are_alike(line, drawn):
    with line.task(10, evenly=True, show=False) as task:
        task.step(None, 1.0)
        for _ in range(4):
            time.sleep(0.3)
            task.step(None, 300.0)
        assert drawn[-1][0].endswith(" s left")
    drawn.clear()
    with line.task(10, show=False) as task:  # such as the stages of a budget
        for number in range(4):
            time.sleep(0.3)
            task.begin("Measuring", number)
    assert not any("left" in words for words, _ in drawn)


def test_it_ends_where_the_call_fails(line, drawn):
    with pytest.raises(ZeroDivisionError), line.task(3, show=False):
        _ = 1 / 0
    assert drawn[-1] == ("", 1.0)


@pytest.fixture(scope="module")
def client():
    manager, client = start_new_kernel(startup_timeout=PATIENCE_SECONDS)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def outputs(client, cell, *, allow_stdin):
    """Run a cell and return its outputs in order: each message's type and content."""
    request, found = client.execute(cell, allow_stdin=allow_stdin), []
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE_SECONDS)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["content"].get("execution_state") == "idle":
            return found
        if message["msg_type"] in {
            "stream",
            "display_data",
            "update_display_data",
            "error",
            "execute_result",
        }:
            found.append((message["msg_type"], message["content"]))


def printed(found):
    return "".join(content["text"] for kind, content in found if kind == "stream")


def test_a_person_at_a_notebook_sees_a_bar_that_leaves_an_empty_output(client):
    found = outputs(client, STEPS, allow_stdin=True)
    shown = [content for kind, content in found if "display_data" in kind]
    assert [kind for kind, _ in found if "display_data" in kind].count("display_data") == 1
    assert len({content["transient"]["display_id"] for content in shown}) == 1
    assert any("Step " in content["data"].get("text/plain", "") for content in shown)
    assert all("<progress" in content["data"]["text/html"] for content in shown[:-1])
    assert shown[-1]["data"] == {}
    # What the step prints comes in order, between the drawings.
    assert printed(found) == "".join(f"call {number}\n" for number in range(1, 20, 2)) + "done\n"
    assert found[-1][0] == "stream"


def test_whoever_runs_a_notebook_without_a_person_gets_no_bar(client):
    found = outputs(client, STEPS, allow_stdin=False)
    assert {kind for kind, _ in found} == {"stream"}


def test_captured_output_holds_no_bar(client):
    found = outputs(client, f"%%capture held\n{STEPS}", allow_stdin=True)
    assert found == []
    assert outputs(client, "print(len(held.outputs))", allow_stdin=True)[0][1]["text"] == "0\n"
