"""Folders of ORTModule's own subscriber: written on both engines, read back, merged as upstream, compared."""

from __future__ import annotations

import argparse
import math
import re
import shutil

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import LedgerError, OptionError
from ortlab.parity.parity import INSPECTED, Parity
from ortlab.parity.upstream_folders import merge_folders, read_folder
from ortlab.records.activation_statistics import TensorStatistics


class Net(nn.Module):
    """Two layers, a module that is called twice, and a tensor that is handed over."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)
        self.scale = scale
        self.inspected: list[torch.Tensor] = []

    def forward(self, x):
        hidden = self.act(self.first(x)) * self.scale
        hidden = ortlab.parity.inspect_activation("hidden", hidden * 2)
        return self.last(self.act(hidden))


def made(scale=1.0):
    torch.manual_seed(3)
    model = Net(scale)
    batch = torch.randn(6, 4)

    def step():
        loss = model(batch).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        return loss.item()

    return model, step


def written(folder, engine, *, steps=3, scale=1.0, **how):
    """Write the activations of some steps; return the losses."""
    model, step = made(scale)
    lab = ortlab.wrap(model, engine=engine)
    try:
        with lab.subscribe(ortlab.parity.StatisticsSubscriber(folder, **how)):
            losses = [step() for _ in range(steps)]
        assert lab.status.executed_by == engine
    finally:
        lab.unwrap()
    return losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of three steps on PyTorch and on ONNX Runtime, and the losses without any subscriber."""
    root = tmp_path_factory.mktemp("runs")
    _, step = made()
    plain = [step() for _ in range(3)]
    seen = {
        "eager": written(root / "pt", "eager"),
        "ort": written(root / "ort", "ort"),
        "late": written(root / "late", "ort", start_step=1, end_step=2),
        "late_eager": written(root / "late_eager", "eager", start_step=1, end_step=2),
    }
    assert seen["eager"] == plain
    for losses in seen.values():
        assert losses == pytest.approx(plain, rel=1e-6)
    return root


@pytest.fixture
def pt(runs, tmp_path):
    """Return a copy of PyTorch's folder, which a test may spoil."""
    return shutil.copytree(runs / "pt", tmp_path / "pt")


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.row("I3", "I4", "I5", "I6")
@pytest.mark.parametrize("engine", ["pt", "ort"])
def test_each_step_has_a_file_for_each_activation_and_gradient_on_both_engines(runs, engine):
    folder = read_folder(runs / engine)
    assert [step.number for step in folder.steps] == [0, 1, 2]
    assert folder.all_problems == ()
    names = {"Net_0_0th_output", "Linear_1_0th_output", "Tanh_2_0th_output", "Linear_3_0th_output", "hidden"}
    for step in folder.steps:
        found = {(one.name, one.direction) for one in step.activations}
        assert found == {(name, way) for name in names for way in ("forward", "backward")}


@pytest.mark.row("I4")
@pytest.mark.parametrize("folder", ["late", "late_eager"])
def test_steps_are_written_from_the_first_up_to_the_last_exclusively(runs, folder):
    late, whole = read_folder(runs / folder), read_folder(runs / "pt")
    (step,) = late.steps
    assert step.number == 1
    assert {one.name for one in step.activations} == {one.name for one in whole.steps[1].activations}
    assert ortlab.parity.compare_folders(whole, late).ok


@pytest.mark.row("I4")
def test_a_folder_is_deleted_only_if_that_is_asked_for(runs, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(LedgerError, match="exists already"):
        written(folder, "eager")
    with pytest.raises(LedgerError, match="holds other things than steps"):
        written(folder, "eager", override_output_dir=True)
    assert (folder / "thesis.txt").exists()
    (folder / "thesis.txt").unlink()
    (folder / "step_7").mkdir()
    written(folder, "eager", steps=1, override_output_dir=True)
    assert [step.number for step in read_folder(folder).steps] == [0]


@pytest.mark.row("T12")
def test_the_deviation_on_both_engines_is_that_of_the_tensor(runs):
    model, _ = made()
    torch.manual_seed(3)
    Net()
    batch = torch.randn(6, 4)
    with torch.no_grad():
        expected = TensorStatistics.of(model.first(batch))
    for engine in ("pt", "ort"):
        found = read_folder(runs / engine).steps[0].find("Linear_1_0th_output", "forward")
        assert found.statistics.std == pytest.approx(expected.std, rel=1e-5)
        assert found.statistics.mean == pytest.approx(expected.mean, rel=1e-5)
        assert found.statistics.sample == pytest.approx(expected.sample, abs=1e-5)
        assert not found.std_is_impossible


@pytest.mark.row("I6")
def test_own_subscribers_see_every_step_on_both_engines_and_leave_nothing():
    class Largest(ortlab.parity.TensorSubscriber):
        def __init__(self, **steps) -> None:
            super().__init__(**steps)
            self.seen = []

        def activation(self, name, tensor, step):
            self.seen.append((step, name, "forward", round(float(tensor.abs().max()), 4)))

        def gradient(self, name, tensor, step):
            self.seen.append((step, name, "backward", round(float(tensor.abs().max()), 4)))

    found = {}
    for engine in ("eager", "ort"):
        model, step = made()
        lab = ortlab.wrap(model, engine=engine)
        before = [dict(vars(part)) for part in model.modules()]
        step()
        subscriber = Largest(start_step=1, end_step=3)
        with lab.subscribe(subscriber) as subscription:
            for _ in range(4):
                step()
            lab.subscribe(Largest()).close()  # another takes nothing from the first
        assert "closed" in repr(subscription)
        for part, was in zip(model.modules(), before, strict=True):
            now = vars(part)
            assert now.keys() == was.keys()
            assert (len(now["_forward_hooks"]), len(now["_forward_pre_hooks"])) == (0, 0)
        seen = len(subscriber.seen)
        step()
        assert len(subscriber.seen) == seen
        found[engine] = sorted(subscriber.seen)
        assert lab.status.executed_by == engine
        lab.unwrap()
    assert {entry[0] for entry in found["eager"]} == {1, 2}
    assert [entry[:3] for entry in found["eager"]] == [entry[:3] for entry in found["ort"]]
    for eager, ort in zip(found["eager"], found["ort"], strict=True):
        assert ort[3] == pytest.approx(eager[3], abs=2e-4)


def test_upstreams_own_classes_work_beside_todays_torch(tmp_path):
    from ortlab.engine import load

    load()
    from onnxruntime.training.utils.hooks import StatisticsSubscriber
    from onnxruntime.training.utils.hooks._subscriber_base import SubscriberBase

    class Doubling(SubscriberBase):
        def post_forward_tensor_apply_impl(self, run_rtx, module, tensor_index, tensor):
            return tensor * 2 if isinstance(module, nn.Tanh) else tensor

    outputs = {}
    for engine in ("eager", "ort"):
        model, _ = made()
        lab = ortlab.wrap(model, engine=engine)
        with lab.subscribe(Doubling(None, None), StatisticsSubscriber(str(tmp_path / engine), start_step=0)):
            outputs[engine] = model(torch.ones(3, 4)).detach()
        lab.unwrap()
        assert (tmp_path / engine / "step_0" / "order.txt").exists()
    plain, _ = made()
    assert torch.allclose(outputs["eager"], outputs["ort"], atol=1e-6)
    assert not torch.allclose(outputs["eager"], plain(torch.ones(3, 4)))


@pytest.mark.row("I3")
def test_a_model_that_was_subscribed_before_it_was_wrapped_is_seen_on_ort(runs, tmp_path):
    from ortlab.engine import load

    load()
    from onnxruntime.training.utils.hooks import StatisticsSubscriber, SubscriberManager

    model, step = made()
    SubscriberManager().subscribe(model, [StatisticsSubscriber(str(tmp_path / "out"))])
    lab = ortlab.wrap(model)
    step()
    assert lab.status.executed_by == "ort"
    lab.unwrap()
    found, expected = (read_folder(path).steps[0] for path in (tmp_path / "out", runs / "ort"))
    names = {one.name for one in expected.activations} - {
        "hidden"
    }  # which only ortlab's subscription listens to
    assert {one.name for one in found.activations} == names


def test_a_step_that_had_subscribers_is_profiled_without_them(tmp_path, wrap):
    model, step = made()
    lab = wrap(model)
    with lab.subscribe(ortlab.parity.StatisticsSubscriber(tmp_path / "out", start_step=0)):
        lab.step(step, n=1, progress=False)
    found = lab.profile(progress=False)
    assert found.nodes
    assert "PythonOp" not in {node.operator for node in found.nodes}
    assert lab.flops(progress=False).total > 0


def test_nobody_listens_unless_something_is_subscribed():
    tensor = torch.ones(3, requires_grad=True)
    assert ortlab.parity.inspect_activation("x", tensor) is tensor


@pytest.mark.parametrize(
    ("how", "said"), [({"start_step": -1}, "no range"), ({"start_step": 2, "end_step": 2}, "no range")]
)
def test_steps_that_are_no_range_are_refused(how, said, tmp_path):
    model, _ = made()
    lab = ortlab.wrap(model, engine="eager")
    with pytest.raises(OptionError, match=said):
        ortlab.parity.StatisticsSubscriber(tmp_path / "out", **how)
    with pytest.raises(OptionError, match="is no subscriber"):
        lab.subscribe(print)
    with pytest.raises(OptionError, match="There is no subscriber"):
        lab.subscribe()
    lab.unwrap()
    assert not (tmp_path / "out").exists()


# --- merging -----------------------------------------------------------------------------------------------------


@pytest.mark.row("I7")
@pytest.mark.parametrize("spoilt", [False, True])
def test_folders_are_merged_as_upstream_does_byte_for_byte(runs, tmp_path, spoilt):
    from ortlab.engine import load

    load()
    from onnxruntime.training.utils.hooks.merge_activation_summary import generate_summaries_per_step

    pt, ort = (shutil.copytree(runs / name, tmp_path / name) for name in ("pt", "ort"))
    if spoilt:
        (ort / "step_1" / "Tanh_2_0th_output_forward").unlink()
        (ort / "step_2" / "hidden_backward").write_text("cut", encoding="utf-8")
        (pt / "step_9").mkdir()
        (pt / "notes.txt").write_text("x", encoding="utf-8")
    arguments = argparse.Namespace(pt_dir=str(pt), ort_dir=str(ort), output_dir=str(tmp_path / "theirs"))
    generate_summaries_per_step(arguments)
    merged = ortlab.parity.merge_folders(pt, ort, tmp_path / "ours")
    assert merged == (tmp_path / "ours" / "merge_pt", tmp_path / "ours" / "merge_ort")
    theirs = {
        one.relative_to(tmp_path / "theirs"): one.read_bytes() for one in (tmp_path / "theirs").rglob("*.txt")
    }
    ours = {
        one.relative_to(tmp_path / "ours"): one.read_bytes() for one in (tmp_path / "ours").rglob("*.txt")
    }
    assert ours == theirs
    assert len(ours) == 6 + spoilt
    if not spoilt:
        assert (
            ortlab.parity.compare_folders(*merged).to_dict()["pairs"]
            == ortlab.parity.compare_folders(pt, ort).to_dict()["pairs"]
        )


def test_a_merge_takes_no_folder_away(runs, pt, tmp_path):
    (tmp_path / "out").mkdir()
    for ours, theirs, out, said in (
        (pt, runs / "ort", tmp_path / "out", "exists already"),
        (pt, runs / "ort", tmp_path, "it holds the run"),
        (pt, pt, pt, "it holds the run"),
        (tmp_path / "none", pt, tmp_path / "new", "There is no folder"),
        (runs / "late", pt, tmp_path / "new", "there is no order to follow"),
    ):
        with pytest.raises(LedgerError, match=said):
            merge_folders(ours, theirs, out, overwrite=out != tmp_path / "out")
    assert (pt / "step_0" / "order.txt").exists()
    merge_folders(pt, runs / "ort", tmp_path / "out", overwrite=True)


# --- comparing ---------------------------------------------------------------------------------------------------


@pytest.mark.row("I8")
def test_equal_runs_agree_and_the_first_module_that_differs_is_named(runs, tmp_path):
    same = ortlab.parity.compare_folders(runs / "pt", runs / "ort")
    assert same.ok
    assert (same.model, same.steps, len(same.pairs)) == ("Net", 3, 30)
    assert not same.not_compared
    assert any("Called several times in a step" in note and "Tanh_2" in note for note in same.notes)
    written(tmp_path / "scaled", "ort", scale=1.01)
    found = ortlab.parity.compare_folders(runs / "pt", tmp_path / "scaled")
    assert found.forward.pair.site.step == 1
    # The scale acts behind the first call of the activation; upstream keeps its second, behind what is inspected.
    assert found.first.module in {"Tanh_2", "hidden (forward)"}
    assert 0.001 < found.first.pair.distance.relative < 0.02
    assert found.backward is not None
    assert Parity.from_dict(found.to_dict()) == found
    loose = ortlab.parity.compare_folders(runs / "pt", tmp_path / "scaled", tolerance=0.5)
    assert loose.ok


def spoil_cut(folder):
    file = folder / "step_2" / "Linear_3_0th_output_forward"
    file.write_text(file.read_text(encoding="utf-8")[:90], encoding="utf-8")
    return "step", "1 files cannot be read (Linear_3_0th_output_forward: it ends in the middle"


def spoil_empty(folder):
    (folder / "step_2" / "hidden_forward").write_text("", encoding="utf-8")
    return "step", "hidden_forward: it is empty"


def spoil_missing(folder):
    (folder / "step_1" / "hidden_forward").unlink()
    return "step", "1 files that order.txt names are missing (hidden_forward)"


def spoil_order(folder):
    (folder / "step_1" / "order.txt").unlink()
    return "step", "order.txt is missing, so the order is that of the names"


def spoil_half_a_name(folder):
    order = folder / "step_1" / "order.txt"
    order.write_text(order.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    return "step", "order.txt ends in the middle of a name"


def spoil_gap(folder):
    shutil.rmtree(folder / "step_1")
    return "folder", "Steps are missing between the first and the last: 1."


def spoil_length(folder):
    shutil.rmtree(folder / "step_2")
    return "notes", "Runs of different length"


def spoil_dtype(folder):
    for file in (folder / "step_0").glob("*ward"):
        file.write_text(file.read_text(encoding="utf-8").replace("float32", "float16"), encoding="utf-8")
    return "notes", "The runs computed in different types"


def spoil_nan(folder):
    file = folder / "step_1" / "hidden_forward"
    file.write_text(re.sub(r"nan: 0", "nan: 2", file.read_text(encoding="utf-8")), encoding="utf-8")
    return (
        "nan",
        "the first entries that are no numbers are in hidden (forward) of step_1: 2 nan and 0 infinite",
    )


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_cut,
        spoil_empty,
        spoil_missing,
        spoil_order,
        spoil_half_a_name,
        spoil_gap,
        spoil_length,
        spoil_dtype,
        spoil_nan,
    ],
)
def test_what_is_half_written_or_different_is_said_and_the_rest_compared(runs, pt, spoil):
    kind, said = spoil(pt)
    folder = read_folder(pt)
    found = ortlab.parity.compare_folders(runs / "ort", pt)
    assert any(said in note for note in found.notes), found.notes
    if kind in ("step", "folder"):
        assert any(said in problem for problem in folder.all_problems)
    if kind == "nan":
        assert found.first.pair.distance.relative == math.inf
        assert found.first.pair.site.kind == INSPECTED
        assert found.first.pair.site.step == 2
    else:
        assert found.ok
    assert any(pair.distance is not None for pair in found.pairs)


def test_runs_of_two_models_or_of_other_steps_are_refused(runs, pt, tmp_path):
    other = tmp_path / "other"
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU())
    lab = ortlab.wrap(model, engine="eager")
    with lab.subscribe(ortlab.parity.StatisticsSubscriber(other)):
        model(torch.ones(2, 1, 6)).sum().backward()
    lab.unwrap()
    with pytest.raises(LedgerError, match="no tensor in common, so they are of two models"):
        ortlab.parity.compare_folders(runs / "pt", other)
    for number in (0, 1):
        shutil.rmtree(pt / f"step_{number}")
    with pytest.raises(LedgerError, match="no step in common"):
        ortlab.parity.compare_folders(pt, runs / "late")
    with pytest.raises(LedgerError, match="There is no folder"):
        ortlab.parity.compare_folders(tmp_path / "none", pt)
    with pytest.raises(LedgerError, match=r"(?s)holds no steps.*Did you mean .*late"):
        ortlab.parity.compare_folders(runs, pt)
    with pytest.raises(OptionError, match="tolerance"):
        ortlab.parity.compare_folders(runs / "pt", runs / "ort", tolerance=-1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([]),
        torch.tensor(3.5),
        torch.arange(300).reshape(3, 100),
        torch.tensor([True, False]),
        torch.tensor([1e-30, 1e30, float("nan"), float("-inf")]),
        torch.randn(130).half(),
        torch.randn(2, 3, dtype=torch.float64) * 1e-7,
        torch.randn(40).bfloat16(),
    ],
)
def test_whatever_the_subscriber_writes_is_read_back(tensor, tmp_path):
    from ortlab.engine import load

    load()
    from onnxruntime.training.utils.hooks import _statistics_subscriber

    from ortlab.parity.upstream_folders import read_file

    path = tmp_path / "file"
    with path.open("w", encoding="utf-8") as file:
        _statistics_subscriber._summarize_tensor("a b forward run", tensor, file, depth=2)
    found = read_file(path.read_text(encoding="utf-8"))
    facts = TensorStatistics.of(tensor)
    assert (found.name, found.direction, found.depth) == ("a b", "forward", 2)
    assert (found.statistics.shape, found.statistics.dtype) == (facts.shape, facts.dtype)
    for name in ("minimum", "maximum", "mean", "std", "nan", "inf", "negative", "positive", "zero"):
        assert getattr(found.statistics, name) == pytest.approx(getattr(facts, name), nan_ok=True)
    assert found.statistics.sample == pytest.approx(
        facts.sample, rel=1e-5, abs=max(found.resolution, 1e-12), nan_ok=True
    )
