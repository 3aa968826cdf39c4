"""The five settings of each log level, by what arrives of a real model; debuggers, crashes, and 1.19.2 as released."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from forked import python
from small_transformers import bert
from torch import nn

import ortlab
from ortlab.engine.runtime_log import crashed_processes, read_log
from ortlab.errors import BuildError, ExecutionError
from ortlab.options.log_levels import LOG_LEVELS, log_level
from ortlab.records.messages import EXPORTER, ORTMODULE, RUNTIME

LEVELS = [level.name for level in LOG_LEVELS]
ROOT = Path(__file__).parents[3]

KNOWN_TO_DEVELOPERS = "type is missing, so it may result in wrong shape inference"


class Bert(nn.Module):
    """A small BERT whose trace, like those of older exporters, warns of an operator without shape inference."""

    def __init__(self):
        super().__init__()
        # What torch exports for the other kind of attention, 1.19.2 as released cannot train.
        self.model = bert(layers=1, words=50, drop=0.1, attn_implementation="eager")

    def forward(self, tokens, labels):
        if torch.jit.is_tracing():
            warnings.warn(
                f"The shape inference of com.microsoft::PythonOp {KNOWN_TO_DEVELOPERS}", stacklevel=1
            )
            warnings.warn("of the user's own", stacklevel=1)
        return self.model(input_ids=tokens, labels=labels).loss


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return a function that trains the model at a level and returns its messages; each level is tried once."""
    done = {}

    def messages(level):
        if level not in done:
            torch.manual_seed(2)
            model, tokens = Bert(), torch.randint(0, 50, (2, 8))
            # At memory level 1, ONNX Runtime warns that it finds no layers in BERT.
            lab = ortlab.wrap(model, log_level=level, memory_level=1, deepcopy_before_export=False)
            for _ in range(2):
                model(tokens, tokens).backward()
            done[level] = lab.messages
            lab.unwrap()
        return done[level]

    return messages


def severities(messages, source):
    """What it was said as: a warning that is known to be harmless is kept as INFO."""
    return {"WARNING" if one.harmless else one.level for one in messages if one.source == source}


# ---- the table ---------------------------------------------------------------------------------------------------


GUIDELINES = {
    "FATAL": ("FATAL", "FATAL", True, True, True),
    "ERROR": ("ERROR", "ERROR", True, True, True),
    "WARNING": ("WARNING", "WARNING", True, True, True),
    "INFO": ("WARNING", "INFO", True, True, False),
    "DEVINFO": ("INFO", "INFO", False, False, False),
    "VERBOSE": ("VERBOSE", "VERBOSE", False, False, False),
}
"""As ORTModule's Training Guidelines have them, under "Log Level Explanations"."""


@pytest.mark.row("B2")
@pytest.mark.parametrize("level", LEVELS)
def test_the_table_is_that_of_the_guidelines(level):
    one = log_level(level)
    settings = (one.backend, one.ortmodule, one.rank_zero_only, one.export_filter, one.graph_filter)
    assert settings == GUIDELINES[level]


@pytest.mark.row("B2", "T10")
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("FATAL", set()),
        ("ERROR", set()),
        ("WARNING", {"WARNING"}),
        ("INFO", {"WARNING"}),
        ("DEVINFO", {"WARNING", "INFO"}),
        ("VERBOSE", {"WARNING", "INFO", "VERBOSE"}),
    ],
)
def test_what_the_backend_says(said, level, expected):
    assert severities(said(level), RUNTIME) == expected


@pytest.mark.row("B2", "B7")
@pytest.mark.parametrize("level", LEVELS)
def test_an_error_of_the_backend_in_a_step_reaches_the_user_at_every_level_but_fatal(level, capfd, wrap):
    model, tokens = Bert(), torch.zeros((2, 8), dtype=torch.long)
    lab = wrap(model, log_level=level)
    model(tokens, tokens).backward()
    with pytest.raises(ExecutionError):
        model(tokens + 10_000, tokens)
    shown = without_late_threads(capfd.readouterr().err)
    recorded = lab.messages.of(level="ERROR", source="ONNX Runtime", stage="step")
    if log_level(level).talks_in_steps:
        assert "Non-zero status code" in recorded[0].text
        assert shown == ""
    else:  # nothing is collected in steps there, so that nothing slows them down
        assert len(recorded) == 0
        assert ("[E:onnxruntime:" in shown) == (level != "FATAL")


@pytest.mark.row("B2")
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("FATAL", set()),
        ("ERROR", set()),
        ("WARNING", {"WARNING"}),
        ("INFO", {"WARNING", "INFO"}),
        ("DEVINFO", {"WARNING", "INFO"}),
        ("VERBOSE", {"WARNING", "INFO"}),  # 1.19.2 has no milder messages of its own
    ],
)
def test_what_ortmodule_says(said, level, expected):
    assert severities(said(level), ORTMODULE) == expected
    assert severities(said(level), EXPORTER) <= expected


class Checkpointed(nn.Linear):
    """Fails to be traced as transformers with gradient checkpointing do beside some releases of torch."""

    def forward(self, x):
        return self._gradient_checkpointing_func(super().forward(x))

    def _gradient_checkpointing_func(self, x):
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "Detected that you are using FX to torch.jit.trace a dynamo-optimized function."
            )
        return x


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_of_ortmodule_is_said_at_every_level_but_fatal(level, wrap):
    model = Checkpointed(4, 4)
    lab = wrap(model, log_level=level)
    with pytest.raises(BuildError):
        model(torch.randn(2, 4))
    errors = lab.messages.of(level="ERROR", source="ORTModule")
    assert [one.stage for one in errors] == ["export"] * (level != "FATAL")
    assert all("Your model is running with gradient checkpointing" in one.text for one in errors)


@pytest.mark.row("B4")
@pytest.mark.parametrize("level", LEVELS)
def test_the_export_filter_leaves_out_what_means_nothing_to_a_user(said, level):
    heard = log_level(level).lets_through("WARNING")
    exporter = said(level).of(source=EXPORTER)
    assert len(exporter.of(text=KNOWN_TO_DEVELOPERS)) == (heard and level in {"DEVINFO", "VERBOSE"})
    assert len(exporter.of(text="of the user's own")) == heard


class Doubled(torch.autograd.Function):
    """Becomes an operator whose shapes torch's exporter does not know."""

    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * 2


class Doubling(nn.Linear):
    def forward(self, x):
        return Doubled.apply(super().forward(x))


@pytest.mark.parametrize("level", LEVELS)
def test_the_export_filter_holds_for_what_torch_writes_in_c_too(level, capfd):
    model = Doubling(2, 2)
    lab = ortlab.wrap(model, log_level=level)
    model(torch.ones(1, 2)).sum().backward()
    found = lab.messages.of(source=EXPORTER, text=KNOWN_TO_DEVELOPERS)
    assert [(one.level, one.stage) for one in found] == [("WARNING", "export")] * (
        level in {"DEVINFO", "VERBOSE"}
    )
    assert all("com.microsoft::PythonOp" in one.text for one in found)
    out, err = capfd.readouterr()
    assert (out, without_late_threads(err)) == ("", "")
    lab.unwrap(forget=True)


@pytest.mark.row("B5")
@pytest.mark.parametrize("level", LEVELS)
def test_the_traced_graph_is_shown_from_info_on(said, level, capfd):
    graphs = said(level).of(source=EXPORTER, text="Exported graph: graph(%")
    assert len(graphs) == (level in {"INFO", "DEVINFO", "VERBOSE"})
    assert all(one.text.count("\n") > 50 for one in graphs)  # all of it in one message
    out, err = capfd.readouterr()
    assert (out, without_late_threads(err)) == ("", "")


RANKS = """
import sys, torch, torch.distributed as dist
from torch import nn
rank, level, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store-{level}", rank=rank, world_size=2)
import ortlab
class Warning(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() < 1e9 else x
model = Warning(2, 2)
lab = ortlab.wrap(model, log_level=level)
model(torch.ones(1, 2)).sum().backward()
print(*sorted({one.source for one in lab.messages}), sep=",")
dist.destroy_process_group()
"""


@pytest.mark.row("B3")
@pytest.mark.parametrize(
    ("level", "on_rank_one"), [("INFO", ""), ("DEVINFO", "ONNX Runtime,ORTModule,exporter")]
)
def test_the_rank_filter_lets_only_rank_zero_speak(level, on_rank_one, tmp_path):
    started = [start(RANKS, str(rank), level, str(tmp_path), state=tmp_path) for rank in range(2)]
    outputs = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert outputs[0][0].strip().endswith("ORTModule,exporter")
    assert outputs[1][0].strip() == on_rank_one


# ---- records -----------------------------------------------------------------------------------------------------


def test_a_message_of_many_lines_is_one_record(said):
    runtime = said("VERBOSE").of(source=RUNTIME)
    table = runtime.of(text="MemoryInsight Summary")[-1]
    assert table.text.count("\n") > 20
    assert table.place.startswith("memory_optimizer.cc")
    assert not any(one.text.startswith("|") for one in runtime)


def test_a_message_knows_its_stage_and_time(said):
    messages = said("VERBOSE")
    assert {one.stage for one in messages} == {"export", "graph", "session", "step"}
    assert {one.source for one in messages.of(stage="step")} == {RUNTIME}
    assert len(messages.of(stage="step", text="streams")) == 2  # one for each step
    times = [one.when for one in messages if one.source == RUNTIME]
    assert times == sorted(times)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", time) for time in times)


def test_text_of_others_before_the_first_head_is_kept_apart():
    foreign, lines = read_log(
        "[ortlab] mark\nsomebody else's\n"
        "2026-11-21 13:38:57.611837761 [I:onnxruntime:, a.cc:1 F] one\ntwo\n"
        "\x1b[0;93m2026-11-21 13:38:57.611837761 [W:onnxruntime:Default, a.cc:2 G] three\x1b[m\n"
    )
    assert foreign == "somebody else's\n"
    assert [(line.severity, line.text, line.place) for line in lines] == [
        ("INFO", "one\ntwo", "a.cc:1 F"),
        ("WARNING", "three", "a.cc:2 G"),
    ]
    assert read_log("") == ("", [])


def test_two_labs_of_different_levels_do_not_share_messages():
    quiet, talking = nn.Linear(2, 2), nn.Linear(2, 2)
    labs = [ortlab.wrap(quiet), ortlab.wrap(talking, log_level="VERBOSE")]
    for _ in range(2):
        for model in (talking, quiet):
            model(torch.ones(1, 2)).sum().backward()
    assert len(labs[0].messages) == 0
    assert len(labs[1].messages.of(stage="step")) > 0
    for lab in labs:
        lab.unwrap()


def test_a_failed_run_gives_its_number_to_the_next(wrap):
    model = nn.Linear(2, 2)
    lab = wrap(model, log_level="VERBOSE")

    def step(*, fail):
        model(torch.ones(1, 2)).sum().backward()
        if fail:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lab.step(lambda: step(fail=True))
    before = len(lab.messages)
    assert before
    assert lab.messages.runs == (None,)
    run = lab.step(lambda: step(fail=False), 2)
    assert len(lab.messages.of(run=run.number)) == 2
    assert len(lab.messages.of(run=0)) == before


@pytest.mark.row("C7")
def test_the_two_warnings_about_deep_copies_are_given_for_their_own_reasons(said):
    unwanted = said("WARNING").of(source=ORTMODULE, text="deep copy")
    assert [one.text.partition(",")[0] for one in unwanted] == [
        "Since the user requested not to deep copy this model"
    ]


# ---- standard streams ---------------------------------------------------------------------------------------------


def start(script, *arguments, state, its=python, **options):
    """Start Python in a process of its own, whose logs are in the folder `state`; `its` is the command for that."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]),
        "XDG_STATE_HOME": str(state),
        "OMP_NUM_THREADS": "2",
    }
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        its("-W", "ignore", "-c", script, *arguments),
        env=environment,
        text=True,
        **pipes,
        **options,
    )


def itself(*arguments):
    """Return the command for a process whose number or limits a test has to know."""
    return [sys.executable, *arguments]


def without_late_threads(shown):
    """Leave out what threads of a new session say when they start, which may be after it was created."""
    return "".join(line for line in shown.splitlines(keepends=True) if "env.cc" not in line)


TALKING = """
import os, subprocess, sys, torch
from torch import nn
import ortlab
sys.path.insert(0, {folder!r})

def tell(where):
    print("python", where, file=sys.stderr)
    os.write(2, f"descriptor {{where}}\\n".encode())
    subprocess.run(["sh", "-c", f"echo child {{where}} >&2"], check=True)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        tell("in a step")
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        tell("in its backward")
        return gradient * 2

class Model(nn.Linear):
    def forward(self, x):
        if torch.jit.is_tracing():
            tell("in the trace")
        return Doubled.apply(super().forward(x))

model = Model(2, 2)
lab = ortlab.wrap(model, log_level="VERBOSE")
model(torch.ones(1, 2)).sum().backward()
os.write(2, b"the second step\\n")
model(torch.ones(1, 2)).sum().backward()
"""


def test_what_others_write_to_standard_error_stays_there_and_in_order(tmp_path):
    process = start(TALKING.format(folder=str(tmp_path)), state=tmp_path)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    shown = without_late_threads(shown)
    words = ("in the trace", "in a step", "in its backward")
    each = {where: [f"{who} {where}" for who in ("python", "descriptor", "child")] for where in words}
    lines = shown.splitlines()
    second = lines.index("the second step")
    assert lines[second + 1 :] == each["in a step"] + each["in its backward"]
    assert lines[second - 6 : second] == each["in a step"] + each["in its backward"]
    assert each["in the trace"] == [line for line in lines if line.endswith("in the trace")][:3]
    assert "onnxruntime:" not in shown  # but in lab.messages


DEBUGGED = """
import sys, torch
from torch import nn
import ortlab

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        step = "inside ONNX Runtime"
        if not torch.jit.is_tracing(): breakpoint()
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

class Model(nn.Linear):
    def forward(self, x):
        where = "tracing" if torch.jit.is_tracing() else "not tracing"
        if where == "tracing": import pdb; pdb.set_trace()
        return Doubled.apply(super().forward(x))

model = Model(2, 2)
lab = ortlab.wrap(model, log_level=sys.argv[1])
model(torch.ones(1, 2)).sum().backward()
print("trained")
"""


@pytest.mark.row("B6")
@pytest.mark.parametrize("level", LEVELS)
def test_the_debugger_works_at_every_level(level, tmp_path):
    """In an export and then in a step of one process: each prompt is asked for both names, and goes on."""
    process = start(DEBUGGED, level, state=tmp_path)
    asked = "p 6 * 7\np locals().get('where')\np locals().get('step')\nc\n"
    shown, complaints = process.communicate(asked * 10, timeout=120)
    assert process.returncode == 0, complaints
    assert without_late_threads(complaints) == ""
    for name in ("'tracing'\n(Pdb) None", "None\n(Pdb) 'inside ONNX Runtime'"):
        assert f"(Pdb) 42\n(Pdb) {name}\n" in shown
    assert shown.endswith("trained\n")


# ---- crashes -----------------------------------------------------------------------------------------------------

BUILDING = """
import torch, ortlab
from torch import nn
model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
lab = ortlab.wrap(model, log_level="VERBOSE")
print("began", flush=True)
model(torch.ones(1, 4)).sum().backward()
print("trained")
"""


def last_words(state):
    """Return the sentence about the crashed process, and the last message of ONNX Runtime in its file."""
    folder = state / "ortlab" / "log"
    (sentence,) = crashed_processes(folder)
    assert crashed_processes(folder) == ()  # told once
    (file,) = folder.iterdir()
    assert str(file) in sentence
    lines = file.read_text(encoding="utf-8").splitlines()
    return sentence, lines


@pytest.mark.row("B7")
@pytest.mark.parametrize("kilobytes", [8, 12])
def test_a_process_that_dies_in_a_build_leaves_every_line(kilobytes, tmp_path):
    """The kernel ends the process while ONNX Runtime writes the line that makes a file too large."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, kilobytes * 1024))

    # Python sets the signal to be ignored when it starts; the script takes that back.
    script = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n" + BUILDING
    process = start(script, state=tmp_path, its=itself, preexec_fn=limit)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGXFSZ
    assert shown == "began\n"
    sentence, lines = last_words(tmp_path)
    assert "died inside ONNX Runtime (graph" in sentence or "died inside ONNX Runtime (session" in sentence
    (file,) = (tmp_path / "ortlab" / "log").iterdir()
    assert file.stat().st_size == kilobytes * 1024  # to the last byte that could be written
    assert sum("onnxruntime:" in line for line in lines) > kilobytes * 2


CRASHING = """
import ctypes, sys, torch
from torch import nn
import ortlab

class Doubled(torch.autograd.Function):
    crash = ""
    @staticmethod
    def forward(ctx, x):
        if Doubled.crash == "forward": ctypes.string_at(0)
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        if Doubled.crash == "backward": ctypes.string_at(0)
        return gradient * 2

class Model(nn.Linear):
    def forward(self, x):
        return Doubled.apply(super().forward(x))

model = Model(2, 2)
lab = ortlab.wrap(model, log_level="VERBOSE")
def step():
    model(torch.ones(1, 2)).sum().backward()
lab.step(step, 2)
Doubled.crash = sys.argv[1]
print(lab.messages.file, flush=True)
lab.step(step)
"""


@pytest.mark.row("B7")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_segfault_in_a_step_leaves_the_last_line_and_the_run(where, tmp_path):
    process = start(CRASHING, where, state=tmp_path, its=itself)
    shown, complaints = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGSEGV, complaints
    sentence, lines = last_words(tmp_path)
    assert f"Process {process.pid} died inside ONNX Runtime (step, run 2, " in sentence
    told_before = Path(shown.strip())
    assert told_before.stem in sentence
    marks = [number for number, line in enumerate(lines) if line.endswith("began: step, run 2")]
    after = lines[marks[0] :]
    assert any("[V:onnxruntime:" in line for line in after)
    assert not any(line.endswith(" ended") for line in lines[marks[-1] :])


def test_an_orderly_end_leaves_no_file(tmp_path):
    process = start(BUILDING, state=tmp_path)
    shown, complaints = process.communicate(timeout=120)
    assert shown == "began\ntrained\n", complaints
    assert list((tmp_path / "ortlab" / "log").iterdir()) == []


def test_the_file_of_a_running_process_is_left_alone(tmp_path):
    process = start(BUILDING + "input()\n", state=tmp_path)
    while process.stdout.readline() != "trained\n":
        assert process.poll() is None
    folder = tmp_path / "ortlab" / "log"
    assert crashed_processes(folder) == ()
    assert len(list(folder.iterdir())) == 1
    process.communicate("\n", timeout=60)
    assert list(folder.iterdir()) == []


def test_a_log_folder_that_cannot_be_written_is_replaced(tmp_path):
    (tmp_path / "ortlab").write_text("a file where the folder should be", encoding="utf-8")
    script = BUILDING + "print(lab.messages.file)\nprint(len(lab.messages.of(source='ONNX Runtime')) > 100)\n"
    process = start(script, state=tmp_path)
    shown, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    *_, file, collected = shown.splitlines()
    assert collected == "True"
    assert not file.startswith(str(tmp_path / "ortlab"))
    assert without_late_threads(complaints) == ""


# ---- 1.19.2 as released -------------------------------------------------------------------------------------------


AS_RELEASED = """
from fault_cases import unrepaired
ortmodule = unrepaired()
import os, sys, torch
from torch import nn
os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
def wrap(model, level):
    return ortmodule.ORTModule(model, ortmodule.DebugOptions(log_level=ortmodule.LogLevel[level]))
"""


def as_released(script, state, lines=""):
    process = start(AS_RELEASED + script, state=state)
    return process.communicate(lines, timeout=120)


@pytest.mark.row("T10")
def test_as_released_the_level_warning_hides_warnings_of_the_backend(tmp_path):
    script = """
os.environ["ORTMODULE_MEMORY_OPT_LEVEL"] = "1"
from test_log_levels import Bert
tokens = torch.zeros((2, 8), dtype=torch.long)
wrap(Bert(), {level!r})(tokens, tokens)
"""
    warned = "No transformer layer boundary nodes found"
    assert warned not in as_released(script.format(level="WARNING"), tmp_path)[1]
    assert warned in as_released(script.format(level="INFO"), tmp_path)[1]


@pytest.mark.parametrize("level", ["WARNING", "INFO", "DEVINFO"])
def test_as_released_the_debugger_shows_no_prompt_in_an_export(level, tmp_path):
    script = f"""
class Model(nn.Linear):
    def forward(self, x):
        if torch.jit.is_tracing(): import pdb; pdb.set_trace()
        return super().forward(x)
wrap(Model(2, 2), {level!r})(torch.ones(1, 2))
"""
    shown, _ = as_released(script, tmp_path, "p 6 * 7\n" + "c\n" * 20)
    assert "(Pdb)" not in shown


def test_as_released_the_warnings_about_deep_copies_are_swapped(tmp_path):
    script = """
os.environ["ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT"] = "0"
wrap(nn.Linear(2, 2), "WARNING")(torch.ones(1, 2))
"""
    complaints = as_released(script, tmp_path)[1]
    assert "Due to the limited GPU memory" in complaints
    assert "Since the user requested" not in complaints
