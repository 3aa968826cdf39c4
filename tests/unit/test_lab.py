"""The lab on a real model and real ONNX Runtime sessions."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import threading
import time
from functools import partial

import pytest
import torch
from forked import python
from small_transformers import batch_of, gpt2, step_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import ortlab
from ortlab.errors import BuildError, LedgerError, OptionError, StepError, WrapError
from ortlab.lab.following import observe
from ortlab.records.runs import Run
from ortlab.render import text


def equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# --- steps and runs ----------------------------------------------------------------------------------------------


def test_a_run_records_who_executed_it_and_where_time_went(lab, experiment):
    run = lab.step(experiment.step, n=4)
    assert run.executed_by == "ort"
    assert len(run.steps) == 4
    assert run.initialization.stage == "export"
    assert run.initialization.total_ms >= run.initialization.export_ms > 0
    assert run.initialization.session_ms > 0
    for step in run.steps:
        assert step.forward_ms > 0
        assert step.backward_ms > 0
        assert step.optimizer_ms > 0
        assert step.total_ms >= step.forward_ms + step.backward_ms + step.optimizer_ms
    assert [step.initialization_ms > 0 for step in run.steps] == [True, False, False, False]
    assert list(lab.runs) == [run]
    assert run.memory.peak_bytes >= run.memory.start_bytes > 0
    assert run.graph_digests.keys() == {"processed", "gradient"}
    assert run.versions["onnxruntime-training-cpu"] == "1.19.2"


def test_losses_equal_those_of_pytorch(experiment, wrap):
    reference = copy.deepcopy(experiment)
    expected = [reference.step().item() for _ in range(5)]
    lab = wrap(experiment.model)
    run = lab.step(experiment.step, n=5)
    assert run.losses == pytest.approx(expected, rel=1e-5)
    for name, value in reference.model.state_dict().items():
        torch.testing.assert_close(experiment.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_rerun_starts_from_the_same_point_bit_for_bit(noisy_experiment, wrap):
    lab = wrap(noisy_experiment.model)
    lab.step(noisy_experiment.step, n=2)
    first = lab.step(noisy_experiment.step, n=4)
    after_first = noisy_experiment.state()
    again = lab.rerun()
    assert again.losses == first.losses
    assert again.start_digest == first.start_digest
    assert again.data_digest == first.data_digest
    assert equal(after_first, noisy_experiment.state())


def test_steps_after_one_another_draw_other_dropout_masks(noisy_experiment, wrap):
    lab = wrap(noisy_experiment.model)
    with torch.no_grad():
        for parameter in noisy_experiment.model.parameters():
            parameter.requires_grad_(requires_grad=True)

    def frozen_step():
        loss = noisy_experiment.model(noisy_experiment.x).pow(2).mean()
        loss.backward()
        noisy_experiment.optimizer.zero_grad()
        torch.rand(1)  # a training loop draws random numbers, for shuffling at least
        return loss

    first, second = lab.step(frozen_step, n=3), lab.step(frozen_step, n=3)
    assert len(set(first.losses + second.losses)) == 6


def test_restore_goes_back_to_the_start_of_the_last_step_call(lab, experiment):
    start = experiment.state()
    lab.step(experiment.step, n=3)
    assert not equal(start, experiment.state())
    lab.restore()
    assert equal(start, [*experiment.model.state_dict().values(), torch.get_rng_state()])
    assert not experiment.optimizer.state


def test_an_optimizer_that_only_the_step_knows_is_restored_too(lab, experiment):
    class Hidden:
        optimizer = torch.optim.AdamW(experiment.model.parameters(), lr=1e-2)

    def step():
        loss = experiment.model(experiment.x).pow(2).mean()
        loss.backward()
        vars(Hidden)["optimizer"].step()
        vars(Hidden)["optimizer"].zero_grad()

    first = lab.step(step, n=3)
    assert lab.rerun().losses == first.losses


def test_the_steps_of_a_measurement_leave_no_trace_in_the_users_containers(lab, experiment):
    losses, counted, seen = [], {}, set()

    def note(loss):
        losses.append(loss)
        counted["steps"] = counted.get("steps", 0) + 1
        seen.add(loss)

    def step():
        loss = experiment.step()
        note(loss.item())
        return loss

    run = lab.step(step, n=3)
    assert run.step_memory_bytes is not None
    assert tuple(losses) == run.losses
    assert (counted, seen) == ({"steps": 3}, set(run.losses))


def test_the_loss_is_that_of_backward_where_the_step_returns_none(lab, experiment):
    seen = []

    def step():
        loss = experiment.model(experiment.x).pow(2).mean()
        seen.append(loss.item())
        loss.backward()

    assert lab.step(step, n=2, memory=False).losses == tuple(seen)


def test_other_data_is_noticed(lab, experiment):
    batches = iter(torch.randn(6, 16, 4))

    def step():
        loss = experiment.model(next(batches)).pow(2).mean()
        loss.backward()
        return loss

    lab.step(step, n=3)
    lab.rerun()
    remarks = lab.compare().contrasts[0].remarks
    assert remarks == ("other data: the model did not see the same inputs",)


def test_engines_are_compared(lab, experiment):
    lab.step(experiment.step, n=6)
    lab.set(engine="eager").rerun()
    lab.set(engine="compile").rerun()
    comparison = lab.compare(baseline=2)
    assert [run.executed_by for run in lab.runs] == ["ort", "eager", "compile"]
    assert comparison.baseline is lab.runs[1]
    for contrast in comparison.contrasts:
        assert contrast.loss_difference < 1e-5
        assert contrast.time_low <= contrast.time_ratio <= contrast.time_high
        assert contrast.remarks == ()


# --- switches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda _: ortlab.wrap(torch.nn.Linear(2, 2), parts=["hidden"]),
            "it takes only, options, engine, name;",
        ),
        (lambda lab: lab.set(engin="eager"), "Did you mean 'engine'?"),
        (lambda lab: lab.rerun(step=5), "it takes n, memory, progress;"),
        (lambda lab: lab.compare(round=3), "Did you mean 'rounds'?"),
        (lambda lab: lab.sweep(memory_levl=[0, 1]), "Did you mean 'memory_level'?"),
        (lambda lab: lab.memory(steps=5), "it takes fn, n, watch;"),
        (lambda lab: lab.graph_diff(stages="gradient"), "Did you mean 'stage'?"),
        (
            lambda _: ortlab.preflight(torch.nn.Linear(2, 2), torch.ones(2), parts=1),
            "it takes options, name, search",
        ),
    ],
)
def test_a_name_that_is_no_option_is_answered_with_what_the_call_takes(lab, experiment, call, said):
    lab.step(experiment.step)
    with pytest.raises(OptionError, match="There is no option") as refused:
        call(lab)
    assert said in refused.value.fix


def test_a_switch_redoes_only_what_it_touches(lab, experiment):
    first = lab.step(experiment.step, n=2)
    plan = lab.plan().rows[0].config
    lab.set(memory_plan=plan)
    assert lab.status.state == "rebuild pending"
    assert lab.status.pending_stage == "session"
    session = lab.rerun()
    assert session.initialization.stage == "session"
    assert session.initialization.export_ms == session.initialization.graph_ms == 0
    lab.set(memory_plan=(), compute_optimizer=False)
    assert lab.rerun().initialization.stage in ("graph", "export")
    lab.set(opset=16)
    assert lab.status.pending_stage == "export"
    assert lab.rerun().initialization.stage == "export"
    assert all(run.losses == pytest.approx(first.losses, rel=1e-5) for run in lab.runs)


@pytest.mark.parametrize(
    "changes", [{"engine": "eager"}, {"memory_level": 1}, {"engine": "compile", "opset": 16}]
)
def test_changes_of_a_rerun_are_for_that_rerun(lab, experiment, changes):
    lab.step(experiment.step, n=2)
    before, seen = lab._bench.configuration, []
    stop = observe(lab, lambda event: seen.append(lab._bench.configuration) if event == "options" else None)
    run = lab.rerun(**changes)
    stop()
    assert run.executed_by == changes.get("engine", "ort")
    assert run.options == before.options.replace(**{k: v for k, v in changes.items() if k != "engine"})
    assert lab._bench.configuration == before == seen[-1]
    assert len(seen) == 2  # the panel has been told of both


def test_a_level_for_one_call_takes_the_place_of_the_plans_that_are_on(lab, experiment):
    lab.step(experiment.step, n=2)
    plan = lab.plan().rows[0].config
    lab.set(memory_plan=plan)
    level = lab.rerun(memory_level=1)
    assert (level.options.memory_level, level.options.memory_plan) == (1, ())
    assert lab.options.memory_plan == (plan,)
    compared = lab.compare(memory_level=1, n=2, rounds=1)
    assert [contrast.run.options.memory_level for contrast in compared.contrasts] == [1]
    with pytest.raises(OptionError, match="contradict"):
        lab.set(memory_level=1)  # what stays is not undone unasked
    lab.set(memory_level=1, memory_plan=())
    assert lab.rerun(memory_plan=plan).options.memory_level == 0
    assert lab.options.memory_level == 1


def test_a_rerun_on_pytorch_leaves_what_is_built(lab, experiment):
    first = lab.step(experiment.step, n=2)
    kept = sum(lab.graph("optimized").operators.values())
    lab.rerun(engine="eager")
    assert sum(lab.graph("optimized").operators.values()) == kept
    again = lab.rerun()
    assert again.initialization is None  # nothing was built anew
    assert again.losses == first.losses


def test_a_change_that_is_refused_runs_nothing(lab, experiment):
    lab.step(experiment.step, n=2)
    before, state = lab._bench.configuration, experiment.state()
    for changes in ({"memory_lvel": 1}, {"engine": "eagre"}, {"memory_level": 9}, {"engine": "checkpoint"}):
        with pytest.raises(OptionError):
            lab.rerun(**changes)
    assert lab._bench.configuration == before
    assert len(lab.runs) == 1
    assert equal(state, experiment.state())


@pytest.mark.row("C6")
def test_going_back_reuses_the_export(lab, experiment):
    lab.step(experiment.step, n=1)
    lab.set(opset=16).rerun()
    lab.set(opset=17).rerun()
    assert [run.initialization.stage for run in lab.runs] == ["export", "export", "session"]


def test_toggling_keeps_module_optimizer_and_keys(lab, experiment):
    keys = list(experiment.model.state_dict())
    parameters = [id(parameter) for parameter in experiment.model.parameters()]
    lab.step(experiment.step, n=1)
    lab.set(memory_level=1).rerun()
    assert lab.module is experiment.model
    assert list(experiment.model.state_dict()) == keys
    assert [id(parameter) for parameter in experiment.model.parameters()] == parameters
    assert isinstance(experiment.model, nn.Module)
    assert type(experiment.model).__name__ == "Classifier"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"memory_lvel": 1}, "no option 'memory_lvel'"),
        ({"memory_level": "much"}, "memory_level cannot be"),
        ({"triton": True}, "triton cannot act"),
        ({"engine": "tpu"}, "no engine 'tpu'"),
        ({"memory_level": 1, "memory_plan": "Gelu+:1:-1"}, "contradict"),
    ],
)
def test_a_wrong_option_changes_nothing(lab, changes, what):
    options = lab.options
    with pytest.raises(OptionError, match=what) as caught:
        lab.set(**changes)
    assert caught.value.fix
    assert lab.options is options
    assert lab.engine == "ort"


@pytest.mark.row("F20")
def test_environment_variables_give_the_first_values(experiment, monkeypatch, wrap):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    lab = wrap(experiment.model)
    assert lab.options.memory_level == 1
    assert "ORTMODULE_MEMORY_OPT_LEVEL" in lab.notes[0]
    lab.step(experiment.step, n=1)
    assert os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] == "1"


def test_a_variable_of_a_gpu_does_not_stop_a_run_on_a_cpu(experiment, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CONV_ALGO_SEARCH", "EXHAUSTIVE")
    lab = ortlab.wrap(experiment.model)
    assert lab.options.conv_algo_search == "HEURISTIC"
    assert "conv_algo_search" not in lab.from_environment
    assert any("ORTMODULE_CONV_ALGO_SEARCH does nothing here" in note for note in lab.notes)
    lab.step(experiment.step, n=1)
    lab.unwrap()
    with pytest.raises(OptionError, match="conv_algo_search cannot act here"):  # what is asked for by name
        ortlab.wrap(experiment.model, conv_algo_search="EXHAUSTIVE")


def test_the_cache_folder_of_the_environment_is_used_for_files_of_our_own(
    experiment, monkeypatch, tmp_path, wrap
):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    lab = wrap(experiment.model)
    assert lab.options.export_cache_dir == str(tmp_path)
    assert any("in files of ortlab's own" in note for note in lab.notes)
    lab.step(experiment.step)
    assert any(str(tmp_path) in message.text for message in lab.messages)
    assert not list(tmp_path.glob("*.onnx"))  # 1.19.2's own cache is off


def test_a_cache_folder_of_the_environment_that_cannot_be_written_is_ignored(
    experiment, monkeypatch, tmp_path, wrap
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    lab = wrap(experiment.model)
    assert lab.options.export_cache_dir == ""
    assert any("ORTMODULE_CACHE_DIR is ignored" in note for note in lab.notes)


def test_two_labs_do_not_disturb_each_other(lab, experiment, wrap):
    torch.manual_seed(1)
    other_model = nn.Linear(4, 2)
    other = wrap(other_model, opset=16)
    lab.step(experiment.step, n=1)
    other.step(lambda: other_model(experiment.x).sum().backward(), n=1)
    assert (lab.options.opset, other.options.opset) == (17, 16)
    assert (lab.graph("exported").opset, other.graph("exported").opset) == (17, 16)


# --- what changes under a lab ------------------------------------------------------------------------------------


@pytest.mark.row("T17", "C6")
def test_another_flag_is_exported_anew(lab, experiment):
    torch.testing.assert_close(
        experiment.model(experiment.x, doubled=True),
        copy.deepcopy(experiment.model)(experiment.x, doubled=True),
    )
    experiment.model(experiment.x, doubled=False)
    assert lab.status.reason == "`input doubled` changed from True to False"


@pytest.mark.row("T17")
def test_a_rebuild_for_another_input_is_said_in_the_run_and_among_the_messages(lab, experiment):
    first = lab.step(experiment.step, n=1)
    assert first.initialization.reason == ""
    assert not lab.messages.of(source="ortlab")
    experiment.x = experiment.x[:1].repeat(2, 1)
    experiment.y = experiment.y[:2]
    assert lab.step(experiment.step, n=1).initialization is None

    def step():
        loss = experiment.model(experiment.x, doubled=True).pow(2).mean()
        loss.backward()
        return loss

    run = lab.step(step, n=2)
    assert run.initialization.stage == "export"
    assert run.initialization.reason == "`input doubled` is new"
    assert "(`input doubled` is new)" in text.render(run)
    (said,) = lab.messages.of(source="ortlab", level="WARNING")
    assert said.text == "Built anew from the export on: `input doubled` is new."
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_other_dtype_and_rank_rebuild_by_themselves(wrap):
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    lab = wrap(model)
    x = torch.randn(3, 4)
    model(x)
    assert model(x[None]).shape == (1, 3, 2)
    assert (
        lab.status.reason == "`input[0]` changed from float32, 2 dims, cpu to float32, 3 dims (1, n, n), cpu"
    )
    model.double()
    torch.testing.assert_close(model(x.double()), copy.deepcopy(model)(x.double()))


def test_a_batch_that_the_model_cannot_take_leaves_the_build(lab, experiment):
    run = lab.step(experiment.step, n=2)
    with pytest.raises(BuildError, match="same dtype") as caught:
        experiment.model(experiment.x.double())
    assert "plain PyTorch" in caught.value.why
    assert lab.rerun().losses == run.losses
    assert lab.runs[-1].initialization is None


def test_parts_in_eval_and_frozen_parameters_stay_so(lab, experiment):
    experiment.model.norm.eval()
    experiment.model.hidden.weight.requires_grad_(requires_grad=False)
    reference = copy.deepcopy(experiment)
    expected = [reference.step().item() for _ in range(3)]
    assert lab.step(experiment.step, n=3).losses == pytest.approx(expected, rel=1e-5)
    assert not experiment.model.norm.training
    assert experiment.model.hidden.weight.grad is None
    assert experiment.model.norm.num_batches_tracked == 0


@pytest.mark.row("T11", "C6")
def test_eval_after_training_has_no_dropout(noisy_experiment, wrap):
    lab = wrap(noisy_experiment.model)
    lab.step(noisy_experiment.step, n=2)
    noisy_experiment.model.eval()
    reference = copy.deepcopy(noisy_experiment.model)
    with torch.no_grad():
        torch.testing.assert_close(noisy_experiment.model(noisy_experiment.x), reference(noisy_experiment.x))
    noisy_experiment.model.train()
    assert lab.rerun().losses == lab.runs[0].losses


def test_a_replaced_parameter_is_used(lab, experiment):
    experiment.model(experiment.x)
    experiment.model.head.weight = nn.Parameter(torch.zeros(3, 8))
    torch.testing.assert_close(
        experiment.model(experiment.x), experiment.model.head.bias.expand(16, 3), check_stride=False
    )


def test_forward_hooks_run_once(lab, experiment):
    calls = []
    experiment.model.register_forward_hook(lambda *_: calls.append(1))
    experiment.model(experiment.x)
    assert calls == [1]


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_step_that_raises_leaves_everything_as_it_was(lab, experiment):
    lab.step(experiment.step, n=2)
    before, count = experiment.state(), len(lab.runs)

    def broken():
        experiment.step()
        message = "in the middle"
        raise ValueError(message)

    with pytest.raises(ValueError, match="in the middle"):
        lab.step(broken, n=3)
    assert equal(before, experiment.state())
    assert len(lab.runs) == count
    assert lab.rerun().losses == lab.runs[0].losses


@pytest.mark.parametrize("call", ["step", "rerun", "rerun with changes"])
def test_an_interrupt_leaves_everything_as_it_was(lab, experiment, call):
    slow = threading.Event()

    def step():
        loss = experiment.step()
        if slow.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return loss

    first = lab.step(step, n=2)
    before = experiment.state()
    slow.set()
    changes = {"engine": "eager", "memory_level": 1} if call == "rerun with changes" else {}
    again = partial(lab.step, step, n=50) if call == "step" else partial(lab.rerun, **changes)
    with pytest.raises(KeyboardInterrupt):
        again()
    slow.clear()
    assert (lab.engine, lab.options.memory_level) == ("ort", 0)
    assert equal(before, experiment.state())
    assert len(lab.runs) == 1
    assert lab.rerun().losses == first.losses


def test_an_interrupt_during_export_leaves_the_lab_usable(lab, experiment):
    original = experiment.model.head.forward
    before = experiment.state()

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    experiment.model.head.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        lab.step(experiment.step, n=2)
    del experiment.model.head.forward
    assert equal(before, experiment.state())
    assert len(lab.runs) == 0
    assert lab.step(experiment.step, n=2).executed_by == "ort"


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda experiment: experiment.model(experiment.x).sum(), "no backward"),
        (lambda _: 1.0, "did not call the wrapped model"),
    ],
)
def test_a_step_that_trains_nothing_is_refused(lab, experiment, step, what):
    before = experiment.state()
    with pytest.raises(StepError, match=what):
        lab.step(lambda: step(experiment), n=2)
    assert equal(before, experiment.state())
    assert len(lab.runs) == 0


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3"])
def test_a_wrong_number_of_steps_is_refused(lab, experiment, count):
    with pytest.raises(StepError, match="whole number"):
        lab.step(experiment.step, n=count)


def test_options_cannot_change_during_a_step(lab, experiment):
    def step():
        experiment.step()
        lab.set(memory_level=1)

    with pytest.raises(StepError, match="while a step is running"):
        lab.step(step)
    assert lab.options.memory_level == 0


def test_asking_before_the_first_step_says_what_to_do(lab):
    for ask in (lab.plan, lab.graph):
        with pytest.raises(BuildError, match="Run a step first"):
            ask()
    for ask in (lab.rerun, lab.restore):
        with pytest.raises(StepError, match="No step has run"):
            ask()
    with pytest.raises(LedgerError, match="no run"):
        lab.compare()


class Checkpointed(nn.Module):
    """A model that a graph cannot express at this memory level."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, self.linear(x), use_reentrant=True).sum()


@pytest.mark.row("C2")
def test_what_cannot_be_exported_is_an_error_and_no_silent_fallback(wrap):
    model = Checkpointed()
    wrap(model)
    with pytest.raises(BuildError, match="checkpoints gradients"):
        model(torch.randn(2, 3))


@pytest.mark.row("C2")
def test_a_fallback_is_marked_wherever_it_appears(wrap):
    torch.manual_seed(5)
    model = Checkpointed()
    x = torch.randn(2, 3)
    lab = wrap(model, fallback=True)
    run = lab.step(lambda: model(x).backward(), n=3)
    assert run.executed_by == "fallback"
    assert "checkpoints gradients" in run.fallback_reason
    assert run.title.startswith("#1 PyTorch (fallback)")
    assert lab.status.state == "fallback"
    lab.set(engine="eager").rerun()
    contrast = lab.compare(baseline=2).contrasts[0]
    assert "executed by PyTorch, not ORT" in contrast.remarks[0]


@pytest.mark.parametrize(("returned", "what"), [(None, "None"), ("text", "a str")], ids=["None", "str"])
def test_a_forward_without_tensors_is_explained(returned, what, wrap):
    class Empty(nn.Linear):
        def forward(self, _):
            return returned

    model = Empty(2, 2)
    wrap(model)
    with pytest.raises(BuildError, match=f"returned no tensor, but {what}"):
        model(torch.randn(2, 2))


def test_a_forward_that_fails_shows_its_own_error(wrap):
    class Broken(nn.Linear):
        def forward(self, _):
            raise KeyError("oops")

    model = Broken(2, 2)
    wrap(model, fallback=True)
    with pytest.raises(BuildError, match="KeyError: 'oops'") as caught:
        model(torch.randn(2, 2))
    assert isinstance(caught.value.__cause__, Exception)


# --- wrapping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [3, None, "model", nn.Linear])
def test_only_modules_are_wrapped(thing):
    with pytest.raises(WrapError, match="cannot be wrapped"):
        ortlab.wrap(thing)


def test_data_parallel_is_refused(experiment):
    with pytest.raises(WrapError, match="DistributedDataParallel"):
        ortlab.wrap(nn.DataParallel(experiment.model))


def test_a_module_is_wrapped_once(lab, experiment, wrap):
    with pytest.raises(WrapError, match="wrapped already"):
        ortlab.wrap(experiment.model)
    lab.unwrap()
    again = wrap(experiment.model)
    assert again.step(experiment.step).executed_by == "ort"


def test_unwrapping_gives_the_model_back_as_trained(lab, experiment):
    lab.step(experiment.step, n=2)
    trained = experiment.state()
    assert lab.unwrap() is experiment.model
    assert equal(trained, experiment.state())
    assert lab.status.state == "unwrapped"
    with pytest.raises(WrapError, match="unwrapped"):
        lab.step(experiment.step)
    assert lab.unwrap() is experiment.model


# --- looking -----------------------------------------------------------------------------------------------------


def test_graphs_by_stage(lab, experiment, tmp_path):
    lab.step(experiment.step, n=1)
    graphs = {
        stage: lab.graph(stage) for stage in ("exported", "processed", "optimized", "gradient", "execution")
    }
    for graph in graphs.values():
        assert sum(graph.operators.values()) == graph.node_count > 0
    assert graphs["gradient"].node_count > graphs["optimized"].node_count
    assert not any("Grad" in name for name in graphs["exported"].operators)
    assert any("Grad" in name for name in graphs["gradient"].operators)
    saved = graphs["execution"].save(tmp_path / "execution.onnx")
    assert saved.stat().st_size == len(graphs["execution"].serialized)
    with pytest.raises(OptionError, match="no graph stage 'final'"):
        lab.graph("final")
    with pytest.raises(BuildError, match="cannot be written"):
        graphs["execution"].save(tmp_path / "absent" / "graph.onnx")


@pytest.mark.row("F13")
def test_a_plan_is_applied_and_changes_the_executed_graph(lab, experiment):
    first = lab.step(experiment.step, n=2)
    plan = lab.plan()
    assert plan.rows
    assert plan.enabled == ()
    assert [row.saving_bytes for row in plan.rows] == sorted(
        (r.saving_bytes for r in plan.rows), reverse=True
    )
    before = lab.graph("execution").node_count
    lab.set(memory_plan=[row.config for row in plan.rows])
    run = lab.rerun()
    assert run.losses == first.losses
    assert lab.plan().enabled == tuple(row.config for row in plan.rows)
    assert lab.graph("execution").node_count > before


def test_observers_hear_of_changes_until_they_stop(lab, experiment):
    events = []
    stop = observe(lab, events.append)
    lab.set(memory_level=1)
    lab.step(experiment.step, n=2)
    assert {"options", "status", "runs"} <= set(events)
    assert any(event.startswith("progress:Exporting") for event in events)
    assert any(event.startswith("progress:Step 2 of 2") for event in events)
    stop()
    heard = len(events)
    lab.set(memory_level=0)
    assert len(events) == heard


def test_what_a_build_says_is_kept(lab, experiment, capfd):
    lab.set(memory_level=1)
    lab.step(experiment.step, n=1)
    texts = [message.text for message in lab.messages]
    assert any("No transformer layer boundary" in text for text in texts)
    assert capfd.readouterr().err == ""


def test_loading_onnx_runtime_leaves_the_root_logger_alone():
    program = "import logging, ortlab.engine; ortlab.engine.load(); print(logging.getLogger().handlers)"
    result = subprocess.run(python("-W", "ignore", "-c", program), capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("in_library", [True, False])
@pytest.mark.parametrize("changes", [{"memory_level": 1}, {"memory_plan": ("Dropout+:1:-1",)}])
def test_a_rerun_draws_the_same_dropout_where_plans_recompute_it(changes, in_library, wrap, monkeypatch):
    if not in_library:
        monkeypatch.setattr("ortlab.engine.sessions.with_quick_dropouts", lambda _: None)
    torch.manual_seed(3)
    model = gpt2(words=60, drop=0.3)
    step = step_of(model, batch_of(words=60, first=1, mask=True))
    lab = wrap(model, **changes)
    runs = [lab.step(step, n=3), lab.rerun(), lab.rerun()]
    assert len(set(runs[0].losses)) == 3  # each step has its own mask
    assert runs[1].losses == runs[2].losses == runs[0].losses
    again = runs[1].initialization  # ONNX Runtime's generators start again in a new session only
    assert again is None if in_library else again.stage == "session"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no timer that sends a signal")
def test_an_interrupt_at_any_time_is_an_interrupt(capfd, wrap):
    """Also one that arrives in C++ code, and is raised where a callback begins: in one line, and nothing else."""
    torch.manual_seed(3)
    model = gpt2(width=256, words=2000, drop=0.1)
    step = step_of(model, batch_of(4, 32, 2000, first=1, mask=True))
    lab = wrap(model)
    expected = lab.step(step).losses
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for moment in range(30):
            signal.setitimer(signal.ITIMER_REAL, 0.2 + moment / 300)
            known = len(lab.runs)
            with pytest.raises(KeyboardInterrupt, match=r"^Stopped (after|before the first step)") as caught:
                lab.step(step, n=1000, progress=False)
            assert len(caught.value._render_traceback_()) == 1
            kept = lab.runs[known:]
            assert str(caught.value).startswith(
                f"Stopped after {len(kept[0].steps)} of" if kept else "Stopped before"
            )
            assert all(run.is_partial for run in kept)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert lab.rerun(n=1).losses == expected
    assert {run.losses[:1] for run in lab.runs} == {expected}
    assert not lab.messages.of(level="ERROR")
    assert "onnxruntime" not in capfd.readouterr().err
