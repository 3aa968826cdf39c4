"""What a switch does to the graph or to the session, on real models: the effect that its help promises."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path

import onnx
import pytest
import torch
from small_transformers import batch_of, bert, gpt2
from torch import nn
from torch.utils.checkpoint import checkpoint  # before ORTModule, as notebooks and transformers import it

import ortlab
from ortlab.engine import load
from ortlab.errors import BuildError, OptionError
from ortlab.options.catalogue import OptionList
from ortlab.options.options import Options, switches, unmet, variable_names
from ortlab.render import text
from ortlab.render.lab_pages import option_list_page


def operators(lab, stage="optimized"):
    return [node.op_type for node in lab.graph(stage).model.graph.node]


def check_gradients(model, reference):
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-6)


# --- shapes ---------------------------------------------------------------------------------------------------------


class DroppingAttention(nn.Linear):
    """Attention whose weights are dropped in training; torch exports that without a mask."""

    def forward(self, x):
        x = super().forward(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


def test_without_symbolic_shapes_ort_is_told_none_and_trains_as_pytorch(wrap):
    torch.manual_seed(0)
    model = bert(layers=1, width=16, words=50)
    reference = copy.deepcopy(model)
    lab = wrap(model, symbolic_shape_inference=False)
    ids = torch.randint(50, (2, 6))
    for one in (model, reference):
        one(input_ids=ids, labels=ids).loss.backward()
    check_gradients(model, reference)
    values = lab.graph("processed").model.graph.value_info
    assert values
    assert all(value.type.tensor_type.elem_type for value in values)
    assert not any(value.type.tensor_type.HasField("shape") for value in values)


def test_without_symbolic_shapes_the_repairs_of_a_graph_are_made(wrap):
    torch.manual_seed(0)
    model, x = DroppingAttention(8, 8), torch.randn(2, 2, 16, 8)
    wrap(model, symbolic_shape_inference=False)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    (first + second).sum().backward()
    assert model.weight.grad.abs().sum() > 0


# --- logging and saved graphs ---------------------------------------------------------------------------------------


@pytest.mark.row("B1", "B10")
def test_graphs_are_saved_under_their_prefix_in_the_folder_of_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU()), torch.randn(3, 4)
    lab = ortlab.wrap(model, save_onnx=True, save_onnx_prefix="net", log_level="VERBOSE")
    assert any("ORTMODULE_SAVE_ONNX_PATH sets save_onnx_path" in note for note in lab.notes)
    model(x).sum().backward()
    stages = ["torch_exported", "post_processed", "optimized_pre_grad", "optimized", "execution_model"]
    assert {file.name for file in tmp_path.iterdir()} == {f"net_{stage}_training.onnx" for stage in stages}
    model.eval()
    with torch.no_grad():
        model(x)
    lab.unwrap()
    stages.remove("optimized_pre_grad")  # without a gradient there is nothing before it
    assert {file.name for file in tmp_path.glob("*inference*")} == {
        f"net_{stage}_inference.onnx" for stage in stages
    }


def test_the_graph_that_is_executed_is_saved_with_plans_too(tmp_path, wrap):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(3, 4)
    lab = wrap(
        model,
        save_onnx=True,
        save_onnx_prefix="net",
        save_onnx_path=str(tmp_path),
        memory_plan=["Gelu+:1:-1"],
    )
    model(x).sum().backward()
    saved = onnx.load(tmp_path / "net_execution_model_training.onnx")
    assert any(node.name.endswith("_recompute") for node in saved.graph.node)
    before = (tmp_path / "net_execution_model_training.onnx").read_bytes()
    lab.graph("execution")  # an analysis makes a session of its own, and leaves the file alone
    assert (tmp_path / "net_execution_model_training.onnx").read_bytes() == before


@pytest.mark.row("B9")
def test_the_variable_gives_the_first_log_level_and_an_argument_wins(experiment, monkeypatch):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "DEVINFO")
    lab = ortlab.wrap(experiment.model)
    assert lab.options.log_level == "DEVINFO"
    assert "ORTMODULE_LOG_LEVEL sets log_level='DEVINFO'." in lab.notes
    lab.unwrap()
    lab = ortlab.wrap(experiment.model, log_level="ERROR")
    assert lab.options.log_level == "ERROR"
    lab.unwrap()


@pytest.mark.row("B8", "F20")
def test_what_the_memory_optimizer_did_is_known_at_info_and_at_every_other_level(wrap):
    torch.manual_seed(2)
    model = gpt2(width=16, words=60, n_positions=16)
    batch = batch_of(words=60, first=3, mask=True)
    reference = copy.deepcopy(model)
    reference(**batch).loss.backward()
    lab = wrap(model)
    model(**batch)
    kept = lab.graph("execution").node_count
    enabled = {}
    for level in ("INFO", "ERROR"):
        lab.set(log_level=level, memory_level=1)
        model.zero_grad()
        model(**batch).loss.backward()
        enabled[level] = lab.plan().enabled
    recomputed = lab.graph("execution").node_count
    assert enabled["INFO"] == enabled["ERROR"] != ()
    assert recomputed > kept
    check_gradients(model, reference)


# --- the export -----------------------------------------------------------------------------------------------------


@pytest.mark.row("C1")
@pytest.mark.parametrize("opset", [14, 17, 20])
def test_the_opset_is_pinned_by_the_variable_and_live(experiment, monkeypatch, opset, wrap):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", str(opset))
    lab = wrap(experiment.model)
    experiment.step()
    assert lab.graph("exported").opset == opset
    lab.set(opset=15)
    experiment.step()
    assert lab.graph("exported").opset == 15


class Checkpointed(nn.Module):
    """Checkpoints its first layer, the reentrant way, which is an autograd Function."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return self.second(checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=True))


@pytest.fixture
def checkpointed():
    torch.manual_seed(2)
    model, x = Checkpointed(), torch.randn(3, 4, requires_grad=True)
    reference = copy.deepcopy(model)
    reference(x).sum().backward()
    return model, reference, x


@pytest.mark.row("C3")
@pytest.mark.parametrize(
    ("changes", "python_ops"), [({"allow_autograd_checkpoint": True}, 1), ({"memory_level": 1}, 0)], ids=repr
)
def test_a_checkpointed_region_is_left_to_pytorch_or_traced_through(checkpointed, changes, python_ops, wrap):
    model, reference, x = checkpointed
    lab = wrap(model, **changes)
    model(x).sum().backward()
    used = operators(lab)
    assert used.count("PythonOp") == python_ops
    assert ("Tanh" in used) == (python_ops == 0)
    check_gradients(model, reference)


@pytest.mark.row("C3")
def test_without_either_a_checkpoint_is_refused_with_both_ways_out(checkpointed, wrap):
    model, _, x = checkpointed
    wrap(model)
    with pytest.raises(BuildError) as refusal:
        model(x)
    assert "memory_level=1" in refusal.value.fix
    assert "allow_autograd_checkpoint=True" in refusal.value.fix
    assert "{" not in str(refusal.value)


@pytest.mark.row("C4", "C5")
def test_custom_functions_run_as_they_are_or_are_traced_through_switched_live(
    custom_layer, monkeypatch, wrap
):
    monkeypatch.setenv("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0")
    model, x = custom_layer, torch.randn(3, 4)
    reference = copy.deepcopy(model)
    reference(x).sum().backward()
    lab = wrap(model)
    assert (
        lab.options.custom_autograd is False
    )  # ORTModule reads the variable when it is imported, which has happened
    gradients = {}
    for on in (False, True, False):
        lab.set(custom_autograd=on)
        model.zero_grad()
        model(x).sum().backward()
        assert ("PythonOp" in operators(lab)) == on
        gradients[on] = model.bias.grad.clone()
    torch.testing.assert_close(gradients[True], reference.bias.grad)
    torch.testing.assert_close(gradients[False] * 1.5, reference.bias.grad)


class Copied(nn.Linear):
    """Counts its deep copies."""

    copies = 0

    def __deepcopy__(self, memo):
        type(self).copies += 1
        new = type(self)(4, 4)
        new.load_state_dict(self.state_dict())
        return new


@pytest.mark.row("C7")
@pytest.mark.parametrize("copied", [True, False])
def test_the_model_is_copied_before_its_export_only_if_wished(copied, wrap):
    model, x = nn.Sequential(Copied(4, 4)), torch.randn(3, 4)
    reference = model[0](x)
    wrap(model, deepcopy_before_export=copied)
    Copied.copies = 0
    torch.testing.assert_close(model(x), reference)
    assert bool(Copied.copies) == copied


# --- compute --------------------------------------------------------------------------------------------------------


class FirstToken(nn.Module):
    """A layer, something behind it, and a slice that leaves one token of five."""

    def __init__(self, behind):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.other = nn.Linear(8, 8, bias=False)
        self.vector = nn.Parameter(torch.randn(8))
        self.behind = behind

    def forward(self, x):
        return self.behind(self, self.layer(x))[:, 0, :]


BEHIND = {
    "add": lambda m, h: h + m.vector,
    "div": lambda m, h: h / (m.vector.abs() + 1),
    "gelu": lambda _, h: nn.functional.gelu(h),
    "softmax": lambda _, h: h.softmax(-1),
    "left operand of a product": lambda m, h: m.other(h),
    "layer norm": lambda m, h: m.norm(h),
    "reshape": lambda _, h: h.view(h.size(0), h.size(1), 2, 4),
    "transpose": lambda _, h: h.transpose(0, 1),
}


@pytest.mark.row("D1", "D2", "D3")
@pytest.mark.parametrize("behind", BEHIND)
def test_a_slice_goes_ahead_of_the_layer_and_of_what_is_behind_it(behind, wrap):
    torch.manual_seed(2)
    model, x = FirstToken(BEHIND[behind]), torch.randn(2, 5, 8)
    reference = copy.deepcopy(model)
    reference(x).pow(2).sum().backward()
    first = {}
    lab = wrap(model)
    for on in (True, False):
        lab.set(compute_optimizer=on)
        model.zero_grad()
        model(x).pow(2).sum().backward()
        used = operators(lab)
        first[on] = used.index("Gather") < used.index("MatMul")
    assert first == {True: True, False: False}
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.row("D2", "D4")
def test_the_last_layer_of_roberta_computes_one_token_for_its_head(wrap):
    torch.manual_seed(2)
    model = bert(
        "ForSequenceClassification", family="Roberta", width=16, words=60, max_position_embeddings=40
    )
    ids = torch.randint(3, 60, (2, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
    lab = wrap(model)
    behind, losses = {}, {}
    for on in (True, False):
        lab.set(compute_optimizer=on)
        losses[on] = model(**batch).loss.item()
        used = operators(lab)
        last = len(used) - 1 - used[::-1].index("Gather")
        behind[on] = used[last:].count("MatMul") + used[last:].count("Gemm")
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert behind[False] == 2  # the head's own
    assert behind[True] == 5  # and the projection and both layers of the last block's feed-forward part


@pytest.mark.row("D6", "D8")
@pytest.mark.parametrize("on", [True, False])
def test_padding_is_marked_for_the_optimizer_on_a_gpu(on):
    """Up to the device: the mark is put by 1.19.2, and the optimizer that takes it away is built for CUDA only."""
    load()
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._runtime_inspector import RuntimeInspector

    embedding = nn.Embedding(20, 8, padding_idx=0)
    tokens = torch.tensor([[5, 6, 0, 0]])
    inspector = RuntimeInspector(logging.getLogger("test"), nn.Sequential(embedding), training=True)
    marks = GraphTransitionManager._add_check_embedding_sparsity_hook(
        on, torch.device("cuda"), logging.getLogger("test"), inspector, nn.Sequential(embedding)
    )
    torch.testing.assert_close(nn.functional.embedding(tokens, embedding.weight, 0), embedding(tokens))
    for mark in marks:
        mark.remove()
    assert len(marks) == on
    assert list(inspector._embedding_module_to_padding_density_map.values()) == [50.0] * on


# --- what this machine has not ----------------------------------------------------------------------------------------

NEEDING = {
    "efficient_attention": ("D9", {"efficient_attention": True}, ("USE_EFFICIENT_ATTENTION", "1")),
    "zero_stage3": ("F23", {"zero_stage3": True}, ("ENABLE_ZERO_STAGE3", "1")),
    "triton": ("H1", {"triton": True}, ("USE_TRITON", "1")),
    "triton_config_file": (
        "H2",
        {"triton": True, "triton_config_file": "a.json"},
        ("TRITON_CONFIG_FILE", "a.json"),
    ),
    "tuning": ("H3", {"tuning": True}, ("ENABLE_TUNING", "1")),
    "tuning_max_duration_ms": (
        "H4",
        {"tuning": True, "tuning_max_duration_ms": 50},
        ("MAX_TUNING_DURATION_MS", "50"),
    ),
    "tuning_results_path": ("H5", {"tuning_results_path": "results"}, ("TUNING_RESULTS_PATH", "results")),
    "flash_attention": ("H6", {"triton": True, "flash_attention": True}, ("USE_FLASH_ATTENTION", "1")),
    "triton_debug": ("H7", {"triton": True, "triton_debug": True}, ("TRITON_DEBUG", "1")),
    "conv_algo_search": ("J7", {"conv_algo_search": "EXHAUSTIVE"}, ("CONV_ALGO_SEARCH", "EXHAUSTIVE")),
}
"""By switch: its row, what switches it on, and the variable that 1.19.2 is then given in a build."""


@pytest.mark.parametrize(
    ("name", "changes", "variable"),
    [
        pytest.param(name, *given, marks=pytest.mark.row(row), id=name)
        for name, (row, *given) in NEEDING.items()
    ],
)
def test_a_switch_that_needs_more_is_shown_says_what_and_reaches_ort(lab, name, changes, variable):
    assert unmet(name, frozenset()).startswith(f"{name} needs ")
    shown = text.render(option_list_page(OptionList(Options(), (name,), frozenset())))
    assert name in shown
    assert "needs" in shown
    assert Options(**changes).environment()[f"ORTMODULE_{variable[0]}"] == variable[1]
    if unmet(name, lab.have):
        before = lab.options
        with pytest.raises(OptionError):
            lab.set(**changes)
        assert lab.options is before


# --- the variables --------------------------------------------------------------------------------------------------

PATHS_OF_THE_INSTALLATION = {
    "ORTMODULE_EXTERNAL_TORCH_CPP_EXTENSION_DIR",
    "ORTMODULE_EXTERNAL_TORCH_CUDA_EXTENSION_DIR",
}
CONSTANTS = {
    "ORTMODULE_TORCH_CPP_DIR",
    "ORTMODULE_IS_DETERMINISTIC",
    "ORTMODULE_ONNX_EXPORT_CONTEXT",
    "ORTMODULE_LOG_LEVEL_MAP",
}


def test_every_variable_that_1_19_2_reads_is_known():
    import onnxruntime.training

    sources = Path(onnxruntime.training.__path__[0]).rglob("*.py")
    names = {
        name
        for file in sources
        for name in re.findall(r"ORTMODULE_[A-Z0-9_]+", file.read_text(encoding="utf-8"))
    }
    known = variable_names() | {"ORTMODULE_JSON_CONFIG_PATH"}
    assert names == known | PATHS_OF_THE_INSTALLATION | CONSTANTS


def settings():
    texts = {
        bool: lambda one: str(int(not one.default)),
        int: lambda one: str(next(iter(one.choices[-1:]), 50)),
    }
    named = {
        "ORTMODULE_LOG_LEVEL": "INFO",
        "ORTMODULE_SKIPCHECK_POLICY": "SKIP_CHECK_DEVICE",
        "ORTMODULE_FALLBACK_POLICY": "FALLBACK_UNSUPPORTED_DATA",
        "ORTMODULE_MEMORY_OPT_CONFIG": "Gelu+:1:-1",
        "ORTMODULE_ENABLE_MEMORY_ALLEVIATION": "Gelu:1",
        "ORTMODULE_CONV_ALGO_SEARCH": "EXHAUSTIVE",
    }
    for one in switches():
        for name in filter(None, (one.env, *one.older_env)):
            yield one.name, name, named.get(name) or texts.get(one.type, lambda _: "some/path")(one)


@pytest.mark.row("J7")
@pytest.mark.parametrize(("option", "name", "given"), list(settings()))
def test_each_variable_gives_the_first_value_and_a_note_says_so(option, name, given):
    options, notes = Options.from_environment({name: given})
    value = getattr(options, option)
    assert value != getattr(Options(), option)
    word = "taken as" if name in {old for one in switches() for old in one.older_env} else "sets"
    assert any(note.startswith(name) and f"{word} {option}={value!r}" in note for note in notes)
    one = next(one for one in switches() if one.name == option)
    waits = one.part_of and not getattr(options, one.part_of) and one.type is bool
    assert bool(waits) == (f"{option} acts once {one.part_of} is on." in notes)


def test_gradients_from_outputs_train_where_a_layer_norm_is_behind_an_addition(wrap):
    """Without more, the session puts the two together and drops the deviation that this gradient reads."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), Residual(), Residual(), nn.Linear(16, 4))
    reference, x = copy.deepcopy(model), torch.randn(2, 5, 8)
    reference(x).pow(2).sum().backward()
    lab = wrap(model, memory_efficient_gradient=True)
    model(x).pow(2).sum().backward()
    used = lab.graph("gradient").operators
    assert used["com.microsoft.InvertibleLayerNormalizationGrad"] == 2
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """A layer around which its input is added, and a layer norm."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.layer(x) + x)
