from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortlab.errors import OptionError
from ortlab.options.options import (
    Effect,
    Group,
    Need,
    Options,
    check_needs,
    declaration,
    switches,
    table,
    unmet,
    variable_names,
)

ORTLAB_OWN = {
    "intra_op_spinning",
    "aten_cross_entropy",
    "aten_backward",
    "aten_recurrent",
    "chunked_loss",
    "cpu_memory_arena",
    "recompute",
}


@pytest.fixture(scope="module")
def ortmodule():
    from ortlab import engine

    return engine.load()


@pytest.fixture
def runtime_options(ortmodule, monkeypatch):
    from onnxruntime.training.ortmodule.options import _RuntimeOptions

    for name in variable_names():
        monkeypatch.delenv(name, raising=False)
    return _RuntimeOptions(logging.getLogger("test"))


def named(flags, kind):
    """Names of the flags that are set, without their common prefix."""
    return {flag.name for flag in kind if flag in flags}


# --- the contract with onnxruntime-training 1.19.2 --------------------------------------------------------------


def ort_defaults(runtime_options) -> dict[str, object]:
    """Defaults of 1.19.2 under ortlab's names, for every switch that 1.19.2 has an attribute for."""
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy
    from onnxruntime.training.ortmodule.options import DebugOptions, _SkipCheck

    r = runtime_options
    debug = DebugOptions()
    policies = named(r.fallback_policy, _FallbackPolicy)
    return {
        "compute_optimizer": r.enable_compute_optimizer,
        "label_sparse_optimizer": r.enable_label_sparse_optimizer,
        "embedding_sparse_optimizer": r.enable_embedding_sparse_optimizer,
        "conv_algo_search": r.conv_algo_search,
        "cast_level": r.propagate_cast_ops_level,
        "cast_strategy": r.propagate_cast_ops_strategy.name,
        "cast_allow": tuple(r.propagate_cast_ops_allow),
        "memory_level": int(r.memory_optimization_level),
        "memory_plan": () if r.memory_optimizer_config_file_path == "" else None,
        "external_gpu_allocator": r.use_external_gpu_allocator,
        "mem_efficient_grad_management": r.enable_mem_efficient_grad_management,
        "memory_efficient_gradient": r.use_memory_efficient_gradient,
        "grad_accumulation_cache": r.enable_grad_acc_optimization,
        "opset": r.onnx_opset_version,
        "custom_autograd": r.enable_custom_autograd_function,
        "deepcopy_before_export": r.deepcopy_before_model_export,
        "export_cache_dir": r.ortmodule_cache_dir,
        "symbolic_shape_inference": r.run_symbolic_shape_infer,
        "static_shape": r.use_static_shape,
        "skip_check": tuple(
            one.name.removeprefix("SKIP_CHECK_") for one in _SkipCheck if one in r.skip_check
        ),
        "fallback": "FALLBACK_DISABLE" not in policies,
        "fallback_policy": tuple(
            one.name.removeprefix("FALLBACK_") for one in _FallbackPolicy if one.name in policies
        ),
        "log_level": debug.logging.log_level.name,
        "save_onnx": debug.save_onnx,
        "save_onnx_prefix": debug.onnx_prefix,
        "save_onnx_path": "" if debug.save_onnx_models.path == str(Path.cwd()) else None,
        "print_input_density": r.print_input_density,
        "print_memory_stats": r.print_memory_stat_by_step,
        "triton": r.enable_triton,
        "tuning": r.enable_tuning,
        "tuning_max_duration_ms": r.max_tuning_duration_ms,
        "tuning_results_path": r.tuning_results_path,
        "zero_stage3": r.enable_zero_stage3_support,
    }


# Read from the environment where they act, without an attribute; all of them are off unless the variable is set.
VARIABLE_ONLY = {
    "allow_autograd_checkpoint",
    "fallback_retry",
    "efficient_attention",
    "sdpa_fallback",
    "flash_attention",
    "triton_config_file",
    "triton_debug",
}


def test_every_default_is_that_of_ort(runtime_options):
    theirs = ort_defaults(runtime_options)

    ours = {one.name: one.ort_default for one in switches() if one.name in theirs}

    assert ours == theirs
    assert {one.name for one in switches()} == set(theirs) | VARIABLE_ONLY | ORTLAB_OWN
    assert not any(one.ort_default for one in switches() if one.name in VARIABLE_ONLY)


def test_session_defaults_are_those_of_ort(ortmodule):
    import onnxruntime

    session = onnxruntime.SessionOptions()

    assert session.enable_cpu_mem_arena is Options().cpu_memory_arena
    with pytest.raises(RuntimeError):  # no entry: ORT's own default, which is to spin
        session.get_session_config_entry("session.intra_op.allow_spinning")


def test_only_fallback_and_spinning_differ_from_ort():
    assert {one.name for one in switches() if one.default != one.ort_default} == {
        "fallback",
        "intra_op_spinning",
    }


def test_ort_reads_every_variable_and_no_older_one(ortmodule):
    training = Path(ortmodule.__file__).parents[1]
    source = "\n".join(path.read_text(encoding="utf-8") for path in training.rglob("*.py"))
    read = set(re.findall(r"ORTMODULE_[A-Z0-9_]+", source))

    assert variable_names() <= read
    older = {name for one in switches() for name in one.older_env}
    assert older == {"ORTMODULE_ENABLE_SPARSE_OPTIMIZER", "ORTMODULE_ENABLE_MEMORY_ALLEVIATION"}
    assert not older & read


@pytest.mark.row("H3", "H4", "J7")
def test_ort_understands_the_environment_that_options_write(ortmodule, monkeypatch, tmp_path):
    from onnxruntime.training.ortmodule.options import _RuntimeOptions, _SkipCheck

    plans = tmp_path / "plans.json"
    options = Options(
        compute_optimizer=False,
        memory_plan="Gelu+:1:-1",
        opset=15,
        skip_check="DEVICE",
        conv_algo_search="EXHAUSTIVE",
        deepcopy_before_export=False,
        print_input_density=True,
        tuning_max_duration_ms=50,
        tuning=True,
        export_cache_dir=tmp_path,
    )
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)
    for name, text in options.environment(plans).items():
        monkeypatch.setenv(name, text)

    theirs = _RuntimeOptions(logging.getLogger("test"))

    assert theirs.enable_compute_optimizer is False
    assert theirs.enable_label_sparse_optimizer is False
    assert theirs.memory_optimizer_config_file_path == str(plans)
    assert theirs.onnx_opset_version == 15
    assert theirs.skip_check == _SkipCheck.SKIP_CHECK_DEVICE
    assert theirs.conv_algo_search == "EXHAUSTIVE"
    assert theirs.deepcopy_before_model_export is False
    assert theirs.print_input_density is True
    assert theirs.enable_tuning is True
    assert theirs.max_tuning_duration_ms == 50
    assert theirs.ortmodule_cache_dir == str(tmp_path)
    assert theirs.fallback_policy.name == "FALLBACK_DISABLE"


def test_the_default_environment_gives_ort_its_own_defaults_but_for_fallback(ortmodule, monkeypatch):
    from onnxruntime.training.ortmodule.options import _RuntimeOptions

    for name in variable_names():
        monkeypatch.delenv(name, raising=False)
    untouched = vars(_RuntimeOptions(logging.getLogger("test")))
    for name, text in Options().environment().items():
        monkeypatch.setenv(name, text)

    ours = vars(_RuntimeOptions(logging.getLogger("test")))

    differing = {name for name in ours if name != "_logger" and ours[name] != untouched[name]}
    assert differing == {"fallback_policy"}


# ORTModule passes it to torch's exporter; here nothing of ortlab stands between the two.
@pytest.mark.filterwarnings("ignore:Setting `training` to something other than default:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:DeepSpeed import error:UserWarning")  # it is optional, and not installed
@pytest.mark.parametrize("opset", [12, 20])
# Gelu is an operator of ONNX from 20 on, which ORT cannot train.
@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph")
def test_ort_trains_at_both_ends_of_the_opsets(ortmodule, monkeypatch, opset):
    import torch

    for name, text in Options(opset=opset, log_level="ERROR").environment().items():
        monkeypatch.setenv(name, text)
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU())
    value = torch.linspace(-1, 1, 8).reshape(2, 4)
    wrapped = ortmodule.ORTModule(model)

    by_ort = torch.autograd.grad(wrapped(value).square().sum(), model.parameters())
    by_torch = torch.autograd.grad(model(value).square().sum(), model.parameters())

    torch.testing.assert_close(by_ort, by_torch)
    manager = wrapped._torch_module._execution_manager(True)
    exported = manager._graph_transition_manager._exported_model_info.exported_model
    assert {one.version for one in exported.opset_import if one.domain == ""} == {opset}


# --- declarations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", switches(), ids=lambda one: one.name)
def test_each_declaration_is_complete(one):
    assert one.read(one.default) == one.default
    assert type(one.default) is one.type is type(one.ort_default)
    assert one.help.endswith(".")
    assert 40 < len(one.help) < 400
    assert isinstance(one.effect, Effect)
    assert isinstance(one.group, Group)
    if one.part_of:
        assert isinstance(getattr(Options(), one.part_of), bool)
    assert one.read(eval(one.example)) is not None  # noqa: S307 - the example is Python text by definition


def test_records_are_imported_without_heavy_packages():
    code = (
        "import sys, ortlab.options.options; "
        "print([m for m in ('torch', 'onnxruntime', 'IPython', 'ipywidgets', 'pandas') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_table_holds_every_switch():
    names = [one.name for one in switches()]

    assert list(table().index) == names
    assert table().loc["opset", "default"] == 17


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("compute_optimizer", "off", False),
        ("compute_optimizer", " True ", True),
        ("compute_optimizer", 0, False),
        ("compute_optimizer", "no", False),
        ("opset", "14", 14),
        ("memory_level", "2", 2),
        ("log_level", "info", "INFO"),
        ("save_onnx_path", Path("graphs"), "graphs"),
        ("memory_plan", "Gelu+:1:-1,BiasGelu+:2:3", ("Gelu+:1:-1", "BiasGelu+:2:3")),
        ("memory_plan", ["Gelu+:1:-1,Cast+:1:-1", "Add+:0:1"], ("Gelu+:1:-1", "Cast+:1:-1", "Add+:0:1")),
        ("memory_plan", "", ()),
        ("memory_plan", ["Gelu+:1:-1", "Gelu+:1:-1"], ("Gelu+:1:-1",)),
        ("skip_check", "execution_agent,device", ("DEVICE", "EXECUTION_AGENT")),
        ("skip_check", [], ()),
    ],
)
def test_text_is_read_as_the_type_of_the_option(name, given, value):
    assert getattr(Options().replace(**{name: given}), name) == value


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("compute_optimizer", "perhaps", "True or False"),
        ("compute_optimizer", 2, "True or False"),
        ("compute_optimizer", None, "True or False"),
        ("opset", "latest", "whole number"),
        ("opset", 14.0, "whole number"),
        ("opset", True, "whole number"),
        ("opset", 11, "one of 12, 13"),
        ("opset", 21, "one of 12, 13"),
        ("cast_level", -2, "one of -1, 0, 1, 2 (did you mean -1?)"),
        ("cast_level", 99, "one of -1, 0, 1, 2 (did you mean 2?)"),
        ("opset", 99, "did you mean 20?"),
        ("cast_allow", "reshape", "names of ONNX operators"),
        ("memory_plan", {"Gelu+:1:-1": True}, "list of strings"),
        ("memory_level", 3, "one of 0, 1, 2"),
        ("tuning_max_duration_ms", -1, "at least 0"),
        ("log_level", "INF", "did you mean INFO?"),
        ("log_level", 3, "text"),
        ("skip_check", "DEVCE", "did you mean DEVICE?"),
        ("memory_plan", 5, "list of strings"),
        ("memory_plan", [1], "list of strings"),
        ("memory_plan", "Gelu", "<cluster>:<strategy"),
        ("memory_plan", "Gelu+:3:-1", "<cluster>:<strategy"),
        ("memory_plan", "Gelu+:1:-2", "<cluster>:<strategy"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_an_example(name, given, expected):
    options = Options(opset=15)

    with pytest.raises(OptionError) as refusal:
        options.replace(**{name: given})

    assert name in refusal.value.what
    assert expected in refusal.value.why
    assert f"{name}=" in refusal.value.fix
    assert options == Options(opset=15)


ABSURD = [
    99,
    -1,
    "",
    "x",
    None,
    1e9,
    10**9,
    1.5,
    math.nan,
    math.inf,
    2**40,
    True,
    b"x",
    {"a": 1},
    object(),
    [1],
    "\0",
]

TAKEN = {
    **{one.name: [True] for one in switches() if one.type is bool},
    **{one.name: [""] for one in switches() if one.type is tuple},  # none of them
    "cast_level": [-1],
    "recompute": ["", "x"],  # any word may be a module of the model
    "tuning_max_duration_ms": [99, 10**9],  # 1.19.2 waits as long as it is told
    **{
        one.name: ["", "x"] for one in switches() if one.type is str and not one.choices
    },  # names of files and folders
}


@pytest.mark.parametrize("value", ABSURD, ids=repr)
@pytest.mark.parametrize("name", [one.name for one in switches()])
def test_an_absurd_value_is_refused_with_what_is_allowed(name, value):
    if any(type(value) is type(one) and value == one for one in TAKEN.get(name, [])):
        Options(**{name: value})
        return
    with pytest.raises(OptionError) as refusal:
        Options(**{name: value})
    assert name in refusal.value.what
    assert ", ".join(map(str, declaration(name).choices)) in refusal.value.why
    assert f"{name}=" in refusal.value.fix


def test_a_misspelt_operator_is_refused_with_the_near_name():
    with pytest.raises(OptionError, match="Did you mean 'Reshape'"):
        Options(cast_allow=["Cast", "Reshap"])
    assert Options(cast_allow="Reshape,FusedMatMul").cast_allow == (
        "Reshape",
        "FusedMatMul",
    )  # ORT's own is taken


def test_an_unknown_option_is_refused_with_the_near_name():
    with pytest.raises(OptionError, match="'memory_level'"):
        Options().replace(memory_levl=1)
    with pytest.raises(OptionError, match="table"):
        Options().replace(zzz=1)
    with pytest.raises(OptionError, match="'opset'"):
        Options.from_dict({"opsets": 14})


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_level": 1, "memory_plan": "Gelu+:1:-1"},
        {"memory_plan": ["Gelu+:1:-1", "Gelu+:2:-1"]},
        {"compute_optimizer": False, "label_sparse_optimizer": True},
        {"embedding_sparse_optimizer": "on", "compute_optimizer": "off"},
        {"fallback_retry": True},
        {"custom_autograd": False, "mem_efficient_grad_management": True},
    ],
)
def test_contradictions_are_refused(changes):
    with pytest.raises(OptionError) as refusal:
        Options().replace(**changes)

    assert refusal.value.why
    assert refusal.value.fix


def test_switching_a_whole_off_needs_no_word_about_its_parts():
    options = Options().replace(compute_optimizer=False)

    assert options.label_sparse_optimizer is True
    assert options.replace(compute_optimizer=True) == Options()
    with pytest.raises(OptionError, match="compute_optimizer is off"):
        options.replace(label_sparse_optimizer=True)


# --- the record -------------------------------------------------------------------------------------------------


def test_only_what_differs_from_the_defaults_is_shown():
    assert repr(Options()) == "Options()"
    assert repr(Options(memory_level=1, opset=15)) == "Options(memory_level=1, opset=15)"


def test_options_cannot_be_changed_in_place_and_can_be_keys():
    options = Options()

    with pytest.raises(AttributeError):
        options.opset = 14
    assert {options: 1}[Options()] == 1


def test_options_survive_json():
    options = Options(memory_plan="Gelu+:1:-1", log_level="INFO", skip_check=[])

    assert Options.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert Options.from_dict({}) == Options()


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({}, None),
        ({"memory_level": 1}, Effect.SESSION),
        ({"memory_plan": "Gelu+:1:-1", "opset": 15}, Effect.EXPORT),
        ({"fallback": True}, Effect.STEP),
        ({"cast_level": 2}, Effect.GRAPH),
        ({"triton": True}, Effect.WRAP),
        ({"sdpa_fallback": True}, Effect.EXPORT),
        # Its sparsity parts marked the exported graph.
        ({"compute_optimizer": False}, Effect.EXPORT),
        # Nothing is saved, so the folder does not matter.
        ({"save_onnx_path": "elsewhere"}, None),
    ],
)
def test_a_change_acts_from_the_earliest_stage_that_it_touches(changes, stage):
    options = Options().replace(**changes)

    assert Options().stage_of_change(options) is stage
    assert options.stage_of_change(Options()) is stage
    assert set(Options().changed(options)) == set(changes)


def test_the_compute_optimizer_alone_acts_from_the_graph():
    parts_off = Options(label_sparse_optimizer=False, embedding_sparse_optimizer=False)

    assert parts_off.stage_of_change(parts_off.replace(compute_optimizer=False)) is Effect.GRAPH


# --- environment variables --------------------------------------------------------------------------------------


def test_an_empty_environment_gives_the_defaults_without_notes():
    assert Options.from_environment({"PATH": "/bin", "HOME": "/root"}) == (Options(), ())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "0", {"compute_optimizer": False}),
        ("ORTMODULE_LOG_LEVEL", "DEVINFO", {"log_level": "DEVINFO"}),
        ("ORTMODULE_ONNX_OPSET_VERSION", "14", {"opset": 14}),
        ("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_DISABLED", {"skip_check": ()}),
        (
            "ORTMODULE_SKIPCHECK_POLICY",
            "SKIP_CHECK_DEVICE|SKIP_CHECK_EXECUTION_AGENT",
            {"skip_check": ("DEVICE", "EXECUTION_AGENT")},
        ),
        ("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE", {}),
        (
            "ORTMODULE_FALLBACK_POLICY",
            "FALLBACK_UNSUPPORTED_DATA",
            {"fallback": True, "fallback_policy": "UNSUPPORTED_DATA"},
        ),
        ("ORTMODULE_ATEN_SDPA_FALLBACK", "0", {"sdpa_fallback": True}),
        ("ORTMODULE_ATEN_SDPA_FALLBACK", "", {}),
        ("ORTMODULE_MEMORY_OPT_CONFIG", "Gelu+:1:-1,Cast+:2:4", {"memory_plan": ["Gelu+:1:-1", "Cast+:2:4"]}),
        (
            "ORTMODULE_ENABLE_SPARSE_OPTIMIZER",
            "0",
            {"label_sparse_optimizer": False, "embedding_sparse_optimizer": False},
        ),
        ("ORTMODULE_ENABLE_MEMORY_ALLEVIATION", "Dropout:0,Gelu:1,Tile:0", {"memory_plan": "Gelu+:1:-1"}),
        pytest.param(
            "ORTMODULE_ENABLE_MEMORY_ALLEVIATION",
            "BiasGelu+:1:-1",
            {"memory_plan": "BiasGelu+:1:-1"},
            marks=pytest.mark.row("F2"),
        ),
    ],
)
def test_variables_set_options(name, text, expected):
    options, notes = Options.from_environment({name: text})

    assert options == Options(**expected)
    assert all(name in note for note in notes)
    assert len(notes) == len(expected)


def test_plans_are_read_from_the_file_that_ort_reads(tmp_path):
    file = tmp_path / "plans.json"
    file.write_text('["Gelu+:1:-1,Cast+:1:-1"]', encoding="utf-8")

    options, _ = Options.from_environment({"ORTMODULE_MEMORY_OPT_CONFIG": str(file)})

    assert options.memory_plan == ("Gelu+:1:-1", "Cast+:1:-1")


def test_a_new_name_wins_over_an_old_one_and_strangers_are_named():
    options, notes = Options.from_environment(
        {
            "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": "1",
            "ORTMODULE_ENABLE_SPARSE_OPTIMIZER": "0",
            "ORTMODULE_MEMORY_OPT_LEVLE": "1",
        }
    )

    assert options == Options(embedding_sparse_optimizer=False)
    assert any("ORTMODULE_ENABLE_SPARSE_OPTIMIZER is ignored" in note for note in notes)
    assert any("did you mean ORTMODULE_MEMORY_OPT_LEVEL?" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "maybe"),
        ("ORTMODULE_MEMORY_OPT_LEVEL", "7"),
        ("ORTMODULE_MEMORY_OPT_CONFIG", "/no/such/file.json"),
        ("ORTMODULE_LOG_LEVEL", "LOUD"),
        ("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_NOTHING"),
        ("ORTMODULE_FALLBACK_POLICY", "NEVER"),
        ("ORTMODULE_ENABLE_MEMORY_ALLEVIATION", "Gelu=1"),
        ("ORTMODULE_JSON_CONFIG_PATH", "/no/such/file.json"),
    ],
)
def test_a_variable_with_nonsense_is_named(name, text):
    with pytest.raises(OptionError) as refusal:
        Options.from_environment({name: text})

    assert name in refusal.value.fix
    assert refusal.value.why


def test_variables_that_contradict_each_other_are_named():
    with pytest.raises(OptionError) as refusal:
        Options.from_environment(
            {
                "ORTMODULE_MEMORY_OPT_LEVEL": "1",
                "ORTMODULE_MEMORY_OPT_CONFIG": "Gelu+:1:-1",
                "ORTMODULE_USE_TRITON": "0",
            }
        )

    assert "ORTMODULE_MEMORY_OPT_LEVEL, ORTMODULE_MEMORY_OPT_CONFIG" in refusal.value.fix
    assert "TRITON" not in refusal.value.fix


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(fallback=True, fallback_policy="UNSUPPORTED_DATA", fallback_retry=True),
        Options(memory_level=2, log_level="VERBOSE", skip_check=[], sdpa_fallback=True),
        Options(save_onnx_path="", triton=True, triton_config_file="fusion.json"),
    ],
    ids=repr,
)
def test_what_is_written_to_the_environment_is_read_again(options):
    written = options.environment()

    assert set(written) <= variable_names()
    assert Options.from_environment(written)[0] == options


def test_the_default_fallback_of_ort_is_written_by_absence():
    # The variable holds one policy, and the default is four of them.
    assert "ORTMODULE_FALLBACK_POLICY" not in Options(fallback=True).environment()


def test_plans_need_a_file_to_be_written():
    with pytest.raises(ValueError, match="JSON file"):
        Options(memory_plan="Gelu+:1:-1").environment()


def test_writing_the_environment_leaves_that_of_the_process_alone():
    before = dict(os.environ)

    Options(memory_level=1).environment()

    assert dict(os.environ) == before


# --- ORTModule's own JSON configuration -------------------------------------------------------------------------


@pytest.mark.row("J7")
def test_the_json_configuration_of_ort_is_read(tmp_path):
    # As in the documentation of load_from_json in 1.19.2.
    file = tmp_path / "config.json"
    config = {
        "PropagateCastOps": {"Strategy": "INSERT_AND_REDUCE", "Level": 2, "Allow": ["ABC", "DEF"]},
        "UseExternalGPUAllocator": False,
        "EnableCustomAutogradFunction": True,
        "EnableGradAccOptimization": True,
        "UseStaticShape": True,
        "RunSymbolicShapeInference": False,
        "SkipCheck": ["SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT"],
        "DebugOptions": {
            "LogLevel": "VERBOSE",
            "SaveONNX": True,
            "ONNXPrefix": "my_model",
            "SaveONNXPath": "graphs",
        },
        "UseMemoryEfficientGradient": True,
        "FallbackPolicy": ["FALLBACK_UNSUPPORTED_DATA", "FALLBACK_UNSUPPORTED_DEVICE"],
        "OnnxOpsetVersion": 14,
    }
    file.write_text(json.dumps(config), encoding="utf-8")

    options, notes = Options.from_environment(
        {"ORTMODULE_JSON_CONFIG_PATH": str(file), "ORTMODULE_ONNX_OPSET_VERSION": "15"}
    )

    assert options == Options(
        cast_strategy="INSERT_AND_REDUCE",
        cast_level=2,
        cast_allow=("ABC", "DEF"),
        external_gpu_allocator=False,
        grad_accumulation_cache=True,
        static_shape=True,
        symbolic_shape_inference=False,
        skip_check=("DEVICE", "BUILD_GRADIENT"),
        log_level="VERBOSE",
        save_onnx=True,
        save_onnx_prefix="my_model",
        save_onnx_path="graphs",
        memory_efficient_gradient=True,
        fallback=True,
        fallback_policy=("UNSUPPORTED_DEVICE", "UNSUPPORTED_DATA"),
        opset=15,
    )
    assert any("ORTMODULE_JSON_CONFIG_PATH sets static_shape=True" in note for note in notes)


def test_the_json_keys_are_those_that_ort_reads(ortmodule):
    from onnxruntime.training.ortmodule.experimental.json_config import _load_config_from_json

    from ortlab.options import variables

    source = Path(_load_config_from_json.__file__).read_text(encoding="utf-8")
    theirs = set(re.findall(r'loading_key = "(\w+)"', source))

    assert {key.split(".")[0] for key in variables._JSON_OPTIONS} == theirs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not a readable JSON file"),
        ("[1]", "no JSON object"),
        ('{"Speed": 1}', "'Speed'"),
        ('{"DebugOptions": {"LogLevel": "LOUD"}}', "one of VERBOSE"),
        ('{"FallbackPolicy": ["FALLBACK_SOMETIMES"]}', "SOMETIMES"),
    ],
)
def test_a_json_configuration_that_makes_no_sense_is_refused(tmp_path, text, expected):
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(OptionError) as refusal:
        Options.from_environment({"ORTMODULE_JSON_CONFIG_PATH": str(file)})

    assert str(file) in refusal.value.what
    assert expected in str(refusal.value)


# --- needs ------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said_with_the_way_to_get_it():
    assert "`ortlab[cuda]`" in unmet("tuning", frozenset())
    assert unmet("tuning", {Need.CUDA}) == ""
    assert unmet("opset", frozenset()) == ""
    assert "pip install triton" in unmet("triton_config_file", {Need.CUDA})
    with pytest.raises(OptionError):
        unmet("turbo", frozenset())


def test_an_option_that_cannot_act_is_refused_only_when_somebody_switched_it_on():
    check_needs(Options(), frozenset())
    check_needs(Options(embedding_sparse_optimizer=False), frozenset())
    check_needs(Options(triton=True), {Need.CUDA, Need.TRITON, Need.TRITON_BUILD})
    with pytest.raises(OptionError, match="zero_stage3") as refusal:
        check_needs(Options(zero_stage3=True), {Need.CUDA})
    assert "pip install deepspeed" in refusal.value.why
