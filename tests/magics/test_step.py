"""%%ort_step: the cell runs n times as a run, where any cell runs; what goes wrong leaves the lab as it was."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
from IPython.core.error import UsageError

from ortlab.records.runs import Run

from .conftest import LOSS, REST

FAILING = (
    "calls += 1\n" + LOSS + "loss.backward()\noptimizer.step()\nif calls == 3:\n    raise KeyError('mine')\n"
)


def indented(lines: str) -> str:
    return lines.replace("\n", "\n    ")


def test_the_cell_runs_n_times_and_trains(net_shell):
    before = net_shell.user_ns["net"][0].weight.detach().clone()
    run = net_shell.run("%%ort_step -n 4\n" + LOSS + REST)
    lab = net_shell.user_ns["lab"]
    assert isinstance(run, Run)
    assert list(lab.runs) == [run]
    assert run.executed_by == "ort"
    assert len(run.losses) == 4
    assert run.losses[3] < run.losses[0]
    assert not before.equal(net_shell.user_ns["net"][0].weight)


def test_one_step_if_no_number_is_given(net_shell):
    assert len(net_shell.run("%%ort_step\n" + LOSS + REST).steps) == 1


def test_the_number_can_be_a_variable_or_quoted(net_shell):
    net_shell.run("count = 3")
    assert len(net_shell.run("%%ort_step -n $count\n" + LOSS + REST).steps) == 3
    assert len(net_shell.run("%%ort_step -n '2'\n" + LOSS + REST).steps) == 2


def test_it_trains_as_a_plain_loop_of_the_same_cell(net_shell):
    run = net_shell.run("%%ort_step -n 4\n" + LOSS + REST)
    net_shell.run("lab.restore(); lab.set(engine='eager'); losses = []")
    net_shell.run("for _ in range(4):\n    " + indented(LOSS + REST) + "losses.append(loss.item())")
    assert run.losses == pytest.approx(net_shell.user_ns["losses"], rel=1e-5)


def test_the_record_is_shown_as_text_and_as_html(net_shell):
    forms = net_shell.formats(net_shell.run("%%ort_step -n 4\n" + LOSS + REST))
    assert forms["text/plain"].startswith("Run #1 ort\n\nExecuted by ONNX Runtime on cpu.")
    assert "<h4>Run #1 ort</h4>" in forms["text/html"]
    assert "4 (3 warm)" in forms["text/plain"]
    assert "4 (3 warm)" in forms["text/html"]


def test_variables_of_the_cell_stay(net_shell):
    run = net_shell.run("%%ort_step -n 2\n" + LOSS + "seen = labels.shape\n" + REST)
    assert net_shell.user_ns["seen"] == (5,)
    assert net_shell.user_ns["loss"].item() == pytest.approx(run.losses[-1])


def test_braces_and_dollars_in_the_cell_are_its_own(net_shell):
    net_shell.run("%%ort_step -n 1\ntext = f'{1 + 1} $labels'\n" + LOSS + REST)
    assert net_shell.user_ns["text"] == "2 $labels"


def test_a_loss_of_an_earlier_cell_is_not_reported(net_shell):
    net_shell.run("loss = torch.tensor(123.0)")
    run = net_shell.run("%%ort_step -n 2\n" + (LOSS + REST).replace("loss", "objective"))
    assert run.losses[-1] == pytest.approx(net_shell.user_ns["objective"].item())


def test_magics_within_the_step_run_with_it(net_shell, capsys):
    run = net_shell.run(
        "%%ort_step -n 2\n" + LOSS + REST.replace("optimizer.step()", "%time optimizer.step()")
    )
    assert len(run.losses) == 2
    assert capsys.readouterr().out.count("Wall time") == 2
    net_shell.run("rerun = %ort_rerun")
    assert net_shell.user_ns["rerun"].losses == run.losses


def test_a_scheduler_behind_a_function_is_restored(net_shell):
    net_shell.run(
        "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)\n"
        "def train():\n    global loss\n    " + indented(LOSS + REST) + "scheduler.step()\n"
    )
    run = net_shell.run("%%ort_step -n 3\ntrain()")
    assert net_shell.user_ns["scheduler"].last_epoch == 3
    rerun = net_shell.run("%ort_rerun")
    assert net_shell.user_ns["scheduler"].last_epoch == 3
    assert rerun.losses == run.losses


def test_an_optimizer_can_be_named(net_shell):
    net_shell.run(
        "class Trainer: pass\ntrainer = Trainer(); trainer.optimizer = optimizer\nsteps = [optimizer.step]"
    )
    cell = LOSS + "loss.backward()\nsteps[0]()\nsteps[0].__self__.zero_grad()\n"
    run = net_shell.run("%%ort_step -n 3 --optimizer trainer.optimizer\n" + cell)
    assert net_shell.run("%ort_rerun").losses == run.losses


def test_a_cell_that_raises_points_at_its_line_and_changes_nothing(stepped_shell, unchanged):
    stepped_shell.run("calls = 0")
    with unchanged(stepped_shell), pytest.raises(KeyError, match="mine") as caught:
        stepped_shell.run("%%ort_step -n 5\n" + FAILING)
    assert stepped_shell.user_ns["calls"] == 0  # as before the call, as everything
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.lineno, last.line) == (7, "raise KeyError('mine')")
    files = {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert not files & {"bench.py", "recording.py", "stepping.py"}


def test_what_the_cell_was_handling_is_still_shown(net_shell):
    with pytest.raises(KeyError) as caught:
        net_shell.run("%%ort_step\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('mine')\n")
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert not caught.value.__suppress_context__


def test_a_cell_that_is_no_python_is_a_syntax_error_at_its_line(net_shell, unchanged):
    with unchanged(net_shell), pytest.raises(SyntaxError) as caught:
        net_shell.run("%%ort_step\n" + LOSS + "loss = = 3\n")
    assert caught.value.lineno == 3


MODELS = """
class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
    def forward(self, x):
        raise ValueError("my own fault")

class Textual(Raising):
    def forward(self, x):
        self.linear(x)
        return "no tensor"

net = %s()
optimizer = torch.optim.AdamW(net.parameters())
lab = %%ort_wrap net --no-panel
"""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Raising", ["ValueError: my own fault", "Where: Cell In[1], line 6, in forward: raise ValueError"]),
        ("Textual", ["The forward of Textual returned no tensor, but a str"]),
    ],
)
def test_a_model_that_fails_is_named_with_its_line(shell, unchanged, model, said):
    shell.run("import torch\nfrom torch import nn\ninputs = torch.randn(5, 8)")
    shell.run(MODELS % model)
    with unchanged(shell), pytest.raises(UsageError) as caught:
        shell.run("%%ort_step\nloss = net(inputs).sum()\nloss.backward()")
    for part in said:
        assert part in str(caught.value)
    shell.run("%ort_unwrap")


def test_a_fault_inside_torch_is_placed_in_the_cell_that_called(net_shell):
    with pytest.raises(UsageError, match="shapes cannot be multiplied") as caught:
        net_shell.run("%%ort_step\nloss = net(inputs.flatten()).sum()\nloss.backward()")
    assert re.search(r"Where: Cell In\[\d+\], line \d+, in .*: loss = net\(inputs.flatten", str(caught.value))


def test_a_batch_of_another_rank_gets_a_build_of_its_own(stepped_shell):
    run = stepped_shell.run(
        "%%ort_step -n 2\nloss = net(inputs.reshape(5, 1, 8)).square().sum()\nloss.backward()"
    )
    assert run.initialization.stage == "export"
    assert run.losses[0] == run.losses[1]
    again = stepped_shell.run("%%ort_step -n 2\n" + LOSS + REST)
    assert again.initialization is None or again.initialization.stage != "export"


def test_a_batch_of_another_dtype_fails_as_in_pytorch_and_changes_nothing(stepped_shell, unchanged):
    with unchanged(stepped_shell), pytest.raises(UsageError, match="same dtype"):
        stepped_shell.run("%%ort_step\nloss = net(inputs.double()).sum()\nloss.backward()")
    assert stepped_shell.run("%ort_rerun").executed_by == "ort"


def test_a_model_may_take_another_dtype(shell):
    shell.run(
        "import torch\nfrom torch import nn\nnet = nn.Sequential(nn.Embedding(9, 3))\ntokens = torch.arange(6)\n"
        "lab = %ort_wrap net --no-panel"
    )
    cell = "%%%%ort_step -n 2\nloss = net(tokens%s).square().sum()\nloss.backward()"
    first, second = shell.run(cell % ""), shell.run(cell % ".int()")
    assert second.initialization.stage == "export"
    assert second.losses == pytest.approx(first.losses)
    shell.run("%ort_unwrap")


def test_magics_act_on_a_lab_that_is_still_wrapped(stepped_shell):
    stepped_shell.run("import ortlab, torch\nother = ortlab.wrap(torch.nn.Linear(4, 2), engine='eager')")
    assert stepped_shell.run("%ort_set log_level=ERROR") is stepped_shell.user_ns["other"]
    stepped_shell.run("other.unwrap()")
    assert stepped_shell.run("%ort_set log_level=ERROR") is stepped_shell.user_ns["lab"]
