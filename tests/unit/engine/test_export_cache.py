"""Exports on disk: what a second process gets, what is not kept, and what a folder may hold."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from forked import python
from torch import nn

import ortlab
from ortlab.engine import kept_builds
from ortlab.engine.disk_cache import entries as export_entries
from ortlab.engine.disk_cache.entries import ExportFolder
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.traced_values import TracedValues
from ortlab.errors import OptionError

pytestmark = pytest.mark.row("C6", "T11")

PROCESS = Path(__file__).with_name("export_cache_process.py")
REPOSITORY = Path(ortlab.__file__).parents[1]


class Net(nn.Module):
    def __init__(self, between=lambda x: x):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)
        self.between = between

    def forward(self, x):
        return self.head(self.drop(self.between(self.hidden(x))))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 2


BATCH = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def train(tmp_path):
    """Return a function that runs a fresh copy of a module with the cache, and returns its output and what was said."""

    def run(module, *batch, training=True, **options):
        kept_builds.forget(module)
        module.train(training)
        lab = ortlab.wrap(module, export_cache_dir=str(tmp_path / "exports"), **options)
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = module(*(batch or (BATCH,)))
        said = [message.text for message in lab.messages if str(tmp_path) in message.text]
        lab.unwrap()
        kept_builds.forget(module)
        return output, " ".join(said)

    run.folder = tmp_path / "exports"
    return run


def net(*args):
    torch.manual_seed(1)
    return Net(*args)


def entries(folder):
    return sorted(folder.glob(f"*{export_entries.SUFFIX}"))


# ---- two processes -------------------------------------------------------------------------------------------------


def in_new_process(folder):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(PROCESS), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_process_traces_nothing_and_computes_the_same_to_the_bit(tmp_path):
    uncached, first, second = in_new_process(""), in_new_process(tmp_path), in_new_process(tmp_path)
    figures = ("loss", "gradients", "evaluated", "kind", "problem_type", "executed_by")
    for name, plain in uncached.items():
        assert plain["executed_by"] == "ort"
        assert plain["evaluated"][0] == plain["evaluated"][1]  # no dropout in eval
        for cached in (first[name], second[name]):
            assert {key: cached[key] for key in figures} == {key: plain[key] for key in figures}, name
        assert (plain["read"], plain["written"]) == (0, 0)
        assert (first[name]["read"], first[name]["written"]) == (0, 2), name  # training and inference
        assert (second[name]["read"], second[name]["written"]) == (2, 0), name
        assert plain["forwards"] == first[name]["forwards"] > 0
        assert second[name]["forwards"] == 0, name
    assert (
        first["bert"]["problem_type"] == "single_label_classification"
    )  # settled by the forward, so repeated


# ---- never a stale graph -------------------------------------------------------------------------------------------


def test_1_19_2_gives_an_evaluation_the_training_graph(ortmodule, monkeypatch, tmp_path, no_fallback):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    module = net()
    wrapped = ortmodule.ORTModule(module, ortmodule.DebugOptions(log_level=ortmodule.LogLevel.ERROR))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.train()(BATCH)
        wrapped.eval()
        first, second = wrapped(BATCH), wrapped(BATCH)
    assert len(list(tmp_path.iterdir())) == 1
    assert not torch.equal(first, second)  # dropout is active


def test_an_evaluation_after_training_has_no_dropout(train):
    module = net()
    train(module)
    output, said = train(module, training=False)
    assert "written" in said
    assert "read" not in said
    torch.testing.assert_close(output, copy.deepcopy(module).eval()(BATCH))


def test_a_changed_option_or_function_gets_its_own_export(train):
    train(net())
    assert "read" in train(net())[1]
    assert "written" in train(net(), opset=16)[1]
    output, said = train(net(torch.tanh), training=False)
    assert "written" in said
    torch.testing.assert_close(output, net(torch.tanh).eval()(BATCH))


def test_weights_are_never_those_of_the_entry(train):
    train(net(), training=False)
    other = net()
    with torch.no_grad():
        other.hidden.weight.mul_(3)
    output, said = train(other, training=False)
    assert "read" in said
    torch.testing.assert_close(output, copy.deepcopy(other)(BATCH))


@pytest.mark.parametrize(
    ("between", "thing"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "a value of the first batch, which `bool` made a constant"),
        (lambda x: x * x.detach().mean().item(), "which `item` made a constant"),
        (lambda x: x * float(x.detach().max()), "made a constant"),
        (lambda x: x * x.detach().flatten()[:1].tolist()[0], "which `tolist` made a constant"),
        (lambda x: x * (2 if torch.equal(x, x.relu()) else 3), "which `equal` made a constant"),
        (lambda x: x * (x[x.detach() > 0].shape[0] + 0), None),
        (lambda x: x * (2 if x[x.detach() > 0].shape[0] > 2 else 3), "made a constant"),
        (Doubled.apply, "Doubled"),
    ],
)
def test_an_export_that_holds_more_than_the_key_is_not_kept_and_named(train, between, thing):
    said = train(net(between))[1]
    if thing is not None:
        assert "is not kept" in said
        assert thing in said
        assert not entries(train.folder)
    else:
        assert "made a constant" in said or "written" in said


def test_batch_normalisation_whose_sizes_torch_checks_is_kept(train):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.convolution(x))

    images = torch.linspace(-1, 1, 2 * 36).view(2, 1, 6, 6)
    outputs = []
    for word in ("written", "read"):
        torch.manual_seed(1)
        module = Normed()
        output, said = train(module, images)
        assert word in said
        outputs.append((output, module.norm.running_mean.clone()))
    assert all(torch.equal(first, second) for first, second in zip(*outputs, strict=True))


def test_a_size_that_data_was_written_into_is_data(train):
    def between(x):
        size = x.shape[0] + 0
        size *= x.detach().sum().long()
        return x * 2 if size > 1 else x

    assert "is not kept" in train(net(between))[1]


def test_branches_on_sizes_are_kept_for_these_sizes_only(train):
    def doubled_if_long(x):
        return x * 2 if x.shape[0] > 3 else x

    assert "written" in train(net(doubled_if_long), BATCH)[1]
    assert "read" in train(net(doubled_if_long), BATCH)[1]
    long = torch.cat([BATCH, BATCH])
    output, said = train(net(doubled_if_long), long, training=False)
    assert "written" in said
    torch.testing.assert_close(output, net(doubled_if_long).eval()(long))


def test_a_forward_that_changes_what_it_depends_on_is_not_kept(train):
    calls = []

    def counted(x):
        calls.append(len(calls))
        return x * len(calls)

    assert "something that its forward itself changes" in train(net(counted))[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_random_numbers_that_python_draws_in_a_trace_are_noticed():
    watch, state = TracedValues(), random.getstate()
    try:
        with watch.on():
            torch.jit.trace(lambda x: x * random.random() + x, BATCH, check_trace=False)
    finally:
        random.setstate(state)
    assert "random numbers" in watch.baked_in


# ---- the folder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[:-20],
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: b"ortlab export 0\n" + data[16:],
        lambda _: b"something else entirely",
    ],
    ids=["empty", "truncated", "changed", "other format", "foreign"],
)
def test_a_damaged_entry_is_ignored_said_and_replaced(train, damage):
    expected = train(net(), training=False)[0]
    (file,) = entries(train.folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    output, said = train(net(), training=False)
    assert "is ignored, since it is" in said
    assert "written" in said
    assert torch.equal(output, expected)
    assert "read" in train(net(), training=False)[1]


def test_an_entry_under_another_name_is_not_used(train):
    train(net())
    (file,) = entries(train.folder)
    train(net(torch.tanh))
    other = next(one for one in entries(train.folder) if one != file)
    other.write_bytes(file.read_bytes())
    assert "written for another key" in train(net(torch.tanh))[1]


def test_files_of_others_are_left_alone(train):
    train.folder.mkdir()
    theirs = train.folder / "0123456789abcdef_0.onnx"
    theirs.write_bytes(b"a graph of 1.19.2")
    assert "written" in train(net())[1]
    assert theirs.read_bytes() == b"a graph of 1.19.2"


def test_a_folder_is_bounded_and_what_was_used_last_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(export_entries, "KEPT_FILES", 3)
    folder = ExportFolder(tmp_path)
    for number in range(3):
        folder.write(f"{number}", b"x" * 10)
        os.utime(folder.file(f"{number}"), (number, number))
    assert folder.read("0") == b"x" * 10
    folder.write("3", b"y")
    assert [file.stem for file in entries(tmp_path)] == ["0", "2", "3"]
    monkeypatch.setattr(export_entries, "KEPT_BYTES", 15)
    folder.write("4", b"z" * 14)
    assert folder.read("4") == b"z" * 14
    assert [file.stem for file in entries(tmp_path)] in (["3", "4"], ["4"])


def test_what_a_killed_writer_left_is_removed(tmp_path):
    folder = ExportFolder(tmp_path)
    left = tmp_path / "0.ortexport-part"
    left.write_bytes(b"half")
    folder.write("1", b"whole")
    assert not left.exists()


def test_writers_and_readers_at_once_see_whole_entries_only(tmp_path):
    work = (
        "import sys; from ortlab.engine.disk_cache.entries import ExportFolder\n"
        "folder, mine = ExportFolder(sys.argv[1]), sys.argv[2].encode() * 200_000\n"
        "for _ in range(40):\n"
        "    folder.write('shared', mine)\n"
        "    found = folder.read('shared')\n"
        "    assert len(found) == 200_000 and len(set(found)) == 1, len(found)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    workers = [subprocess.Popen(python("-c", work, tmp_path, letter), env=environment) for letter in "abc"]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert len(entries(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_is_refused_beforehand(tmp_path, wrap):
    file = tmp_path / "file"
    file.write_text("in the way")
    module = net()
    with pytest.raises(OptionError, match="cannot be kept") as caught:
        ortlab.wrap(module, export_cache_dir=str(file / "exports"))
    assert caught.value.why
    assert caught.value.fix
    lab = wrap(module)
    before = lab.options
    with pytest.raises(OptionError, match="cannot be kept"):
        lab.set(export_cache_dir=str(file / "exports"))
    assert lab.options is before


@pytest.mark.skipif(os.name != "posix", reason="asks for permission bits")
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    folder, module = tmp_path / "exports", net()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(OptionError, match="others could put graphs there") as caught:
        ortlab.wrap(module, export_cache_dir=str(folder))
    assert "Every user" in caught.value.why
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(folder))
    lab = ortlab.wrap(module)
    assert lab.options.export_cache_dir == ""
    assert any("others could put graphs there" in note for note in lab.notes)
    lab.unwrap()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folder.chmod(0o755)
    if folder.stat().st_uid:  # root is trusted
        with pytest.raises(OptionError, match="belongs to user"):
            ortlab.wrap(module, export_cache_dir=str(folder))


@pytest.mark.skipif(os.name != "posix", reason="asks for permission bits")
def test_an_entry_that_others_could_have_written_is_ignored_and_said(train):
    expected, _ = train(net())
    (entry,) = entries(train.folder)
    entry.chmod(0o666)
    output, said = train(net())
    assert "others could have written it" in said
    assert "was read from" not in said
    assert torch.equal(output, expected)


def test_a_folder_that_disappears_does_not_stop_a_training(train, tmp_path, wrap):
    module = net()
    train.folder.mkdir()
    lab = wrap(module, export_cache_dir=str(train.folder))
    train.folder.rmdir()
    train.folder.write_text("in the way now")
    module(BATCH).sum().backward()
    assert any("is not kept" in message.text for message in lab.messages)
    assert lab.status.executed_by == "ort"


def test_the_digest_of_code_does_not_depend_on_who_else_holds_its_constants():
    source = "def function(one):\n    return one * 3.25, 'text that nobody else has', (1.5, one.shape)"
    namespace: dict[str, object] = {}
    exec(source, namespace)  # noqa: S102 - code of its own
    before = baked_in.digest_of_code(namespace["function"])
    held = [*namespace["function"].__code__.co_consts]  # marshal writes what has several owners otherwise
    assert baked_in.digest_of_code(namespace["function"]) == before
    assert len(held) > 2
    exec(source.replace("3.25", "3.5"), namespace)  # noqa: S102 - code of its own
    assert baked_in.digest_of_code(namespace["function"]) != before
