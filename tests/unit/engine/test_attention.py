"""Attention by torch inside ORT's graph: on, off, live, per lab, and only where torch itself computes it so."""

from __future__ import annotations

import importlib

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortlab
from ortlab.engine import load
from ortlab.engine.build_environment import building_with
from ortlab.engine.operators import layer_symbolics
from ortlab.engine.operators import symbolics as attention
from ortlab.options.options import Options

pytestmark = pytest.mark.filterwarnings("ignore:sdpa_fallback leaves an attention in pieces:UserWarning")

BATCH, HEADS, POSITIONS, FEATURES = 2, 2, 8, 16


class Attention(nn.Module):
    """One layer of attention, with whatever mask and dropout."""

    def __init__(self, *, dropout: float = 0.0, learned: bool = False, causal: bool = False) -> None:
        super().__init__()
        size = HEADS * FEATURES
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(1, HEADS, POSITIONS, POSITIONS)) if learned else None
        self.dropout = dropout
        self.causal = causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = (
            part(x).view(BATCH, -1, HEADS, FEATURES).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mask = mask if self.bias is None else self.bias
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout, is_causal=self.causal
        )
        return attended.square().mean()


@pytest.fixture
def x():
    torch.manual_seed(2)
    return torch.randn(BATCH, POSITIONS, HEADS * FEATURES)


def torch_operators(lab):
    """Name the operators that torch executes in a lab's gradient graph, but those of `aten_backward`."""
    graph = onnx.load_model_from_string(lab._bench.ort.execution.serialized_graph("gradient")).graph
    nodes = [node for node in graph.node if node.op_type == "ATen"]
    named = {
        attribute.s.decode() for node in nodes for attribute in node.attribute if attribute.name == "operator"
    }
    return {name for name in named if not name.startswith("ortlab::")}


def gradients(model):
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def padding():
    mask = torch.ones(BATCH, 1, 1, POSITIONS, dtype=torch.bool)
    mask[:, :, :, 5:] = False
    return mask


MASKS = {
    "none": lambda: None,
    "padding": padding,
    "triangle": lambda: torch.ones(POSITIONS, POSITIONS).tril().bool().view(1, 1, POSITIONS, POSITIONS),
    "numbers": lambda: torch.linspace(-2, 2, BATCH * POSITIONS**2).view(BATCH, 1, POSITIONS, POSITIONS),
}


@pytest.mark.row("J7")
@pytest.mark.parametrize("mask", MASKS)
def test_the_switch_makes_one_call_of_an_attention_with_torchs_numbers_and_takes_it_back(mask, x, wrap):
    model, mask = Attention(), MASKS[mask]()
    expected = model(x, mask)
    expected.backward()
    wanted = gradients(model)
    lab = wrap(model)
    model(x, mask).backward()
    model.zero_grad()
    assert not torch_operators(lab)

    lab.set(sdpa_fallback=True)
    loss = model(x, mask)
    loss.backward()

    assert torch_operators(lab) == {attention.ON_CPU, f"{attention.ON_CPU}_backward"}
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model), wanted)

    lab.set(sdpa_fallback=False)
    model(x, mask)
    assert not torch_operators(lab)


def test_a_causal_attention_is_one_call_too(x, wrap):
    model = Attention(causal=True)
    expected = model(x)
    lab = wrap(model, sdpa_fallback=True)
    torch.testing.assert_close(model(x), expected)
    assert attention.ON_CPU in torch_operators(lab)


@pytest.mark.parametrize("causal", [False, True], ids=["mask", "causal"])
def test_heads_that_share_keys_and_values_are_one_call_too(causal, x, wrap):
    class Shared(Attention):
        def forward(self, x, mask=None):
            query, key, value = (
                part(x).view(BATCH, -1, HEADS, FEATURES).transpose(1, 2)
                for part in (self.query, self.key, self.value)
            )
            key, value = key[:, : HEADS // 2], value[:, : HEADS // 2]
            how = {"is_causal": True} if causal else {"attn_mask": mask}
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how).square().mean()

    model, mask = Shared(), padding()
    expected = model(x, mask)
    expected.backward()
    wanted = gradients(model)
    lab = wrap(model, sdpa_fallback=True)
    loss = model(x, mask)
    loss.backward()
    assert torch_operators(lab) == {attention.ON_CPU, f"{attention.ON_CPU}_backward"}
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(model), wanted)


def test_frozen_projections_get_no_gradient_and_the_others_the_right_one(x, wrap):
    model = Attention()
    model.query.requires_grad_(requires_grad=False)
    model(x).backward()
    wanted = model.value.weight.grad.clone()
    model.zero_grad()
    lab = wrap(model, sdpa_fallback=True)
    model(x).backward()
    assert attention.ON_CPU in torch_operators(lab)
    assert model.query.weight.grad is None
    torch.testing.assert_close(model.value.weight.grad, wanted)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Attention(learned=True), "learned"),
        (Attention(dropout=0.5), "without dropout only"),
    ],
    ids=["learned mask", "dropout"],
)
def test_what_torch_has_no_operator_for_stays_in_pieces_and_a_message_says_why(model, reason, x, wrap):
    lab = wrap(model, sdpa_fallback=True)
    model(x).backward()
    assert not torch_operators(lab)
    assert any("sdpa_fallback" in said.text and reason in said.text for said in lab.messages)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.row("J7")
def test_two_labs_in_one_kernel_differ(x):
    one, other = Attention(), Attention()
    on, off = ortlab.wrap(one, sdpa_fallback=True), ortlab.wrap(other)
    one(x)
    other(x)
    assert attention.ON_CPU in torch_operators(on)
    assert not torch_operators(off)
    off.set(memory_level=1)
    on.set(opset=16)
    one(x).backward()
    other(x).backward()
    assert attention.ON_CPU in torch_operators(on)
    assert not torch_operators(off)
    on.unwrap()
    off.unwrap()


FLOATS = "Float(2, 2, 8, 16, strides=[256, 128, 16, 1], requires_grad=0, device=cuda:0)"
ON_A_GPU = f"""
graph(%q : {FLOATS}, %k : {FLOATS}, %v : {FLOATS},
      %mask : Bool(2, 1, 1, 8, strides=[8, 8, 8, 1], requires_grad=0, device=cuda:0)):
  %dropout : float = prim::Constant[value=0.1]()
  %no : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  %output : {FLOATS} = aten::scaled_dot_product_attention(%q, %k, %v, %mask, %dropout, %no, %none, %no)
  return (%output)"""


@pytest.mark.parametrize("switched", [True, False])
def test_on_a_gpu_it_is_the_efficient_operator_with_the_arguments_that_this_torch_takes(
    switched, monkeypatch
):
    load()
    from ortlab.engine.sessions import register_operators

    register_operators(17)
    traced = torch._C.parse_ir(ON_A_GPU)
    torch._C._jit_pass_erase_number_types(traced)  # as before every export
    settings = importlib.import_module("torch.onnx._globals").GLOBALS
    monkeypatch.setattr(settings, "_export_onnx_opset_version", 17)
    with building_with(Options(sdpa_fallback=switched)):
        exported = torch._C._jit_pass_onnx(traced, torch._C._onnx.OperatorExportTypes.ONNX)
    calls = [node for node in exported.nodes() if node.kind() == "org.pytorch.aten::ATen"]
    assert len(calls) == int(switched)
    for call in calls:
        assert call.s("operator") == attention.ON_CUDA
        taken = getattr(torch.ops.aten, attention.ON_CUDA).default._schema.arguments
        assert len(list(call.inputs())) == len(taken)
        expanded = list(call.inputs())[3]
        assert expanded.node().kind() == "onnx::Expand"  # to one number for each score, as torch does it


class SharedHeads(nn.Module):
    """Attention in which four heads share a key and a value."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, heads * FEATURES) for heads in (8, 2, 2))
        self.how = how

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, FEATURES)).transpose(1, 2) for part in self.parts)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True, **self.how
        )
        return attended.square().mean()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_heads_that_share_keys_and_values_are_repeated_in_the_graph(x, mask):
    model = SharedHeads(scale=0.3)
    expected = model(x, mask())
    expected.backward()
    reference = gradients(model)
    lab = ortlab.wrap(model)
    for times in (1, 2):  # the second batch has other sizes than the export
        seen = mask()
        if seen is not None and len(seen) == BATCH:
            seen = torch.cat([seen] * times)
        loss = model(torch.cat([x] * times), seen)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(gradients(model), reference, rtol=1e-4, atol=1e-6)
    assert "scaled_dot_product_attention" not in torch_operators(lab)


def blind():
    """A mask by which the first sample's second position sees nothing, as where padding stands on the left."""
    mask = torch.ones(BATCH, 1, POSITIONS, POSITIONS, dtype=torch.bool).tril()
    mask[0, :, 1] = False
    return mask


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_position_that_sees_nothing_trains_as_in_pytorch(x, dropout):
    torch.manual_seed(3)
    model = Attention(dropout=dropout)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = model(x, blind())
        expected.backward()
    wanted = gradients(model)
    lab = ortlab.wrap(model)
    loss = model(x, blind())
    loss.backward()
    found = gradients(model)
    assert all(one.isfinite().all() for one in found.values())
    if not dropout:
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(found, wanted)
    lab.unwrap()


@pytest.mark.parametrize("mask", ["padding", "triangle"])
def test_what_is_not_a_number_is_none_behind_a_masked_attention_either(mask, x):
    torch.manual_seed(3)
    model = Attention()
    x[1, 4, 3] = torch.nan
    expected = model(x, MASKS[mask]())
    assert expected.isnan()
    lab = ortlab.wrap(model)
    assert model(x, MASKS[mask]()).isnan()
    lab.unwrap()


def test_the_probabilities_of_a_masked_attention_are_kept_once(x, wrap):
    model, mask = Attention(), MASKS["triangle"]()
    lab = wrap(model)
    lab.step(lambda: model(x, mask).backward(), n=1, memory=False)
    used = [node.operator for node in lab.profile(n=1, progress=False).nodes]
    assert "Softmax" in used
    assert "IsNaN" not in used
    scores = BATCH * HEADS * POSITIONS**2
    kept = [one.operator for one in lab.activations().rows if one.bytes in {scores, 4 * scores}]
    assert kept == ["Softmax"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_boolean_mask_is_reduced_in_float32(dtype, ortmodule):
    """A GPU has no kernel for a maximum in bfloat16; on the CPU PyTorch computes a bfloat16 attention as a whole."""
    from torch.onnx._internal import jit_utils

    graph = torch._C.Graph()
    mask, query = graph.addInput(), graph.addInput()
    mask.setType(torch._C.TensorType.get().with_dtype(torch.bool))
    query.setType(torch._C.TensorType.get().with_dtype(dtype))
    context = jit_utils.GraphContext(graph, graph.block(), 17, None, {}, {}, set())
    _, sees = layer_symbolics._masking(context, mask, query)
    kinds, targets = [], []
    while sees != mask:
        node = sees.node()
        kinds.append(node.kind())
        targets += [node.i("to")] if node.kind() == "onnx::Cast" else []
        sees = next(node.inputs())
    in_float32 = dtype is torch.float32
    assert kinds == ["onnx::Cast"] * (not in_float32) + ["onnx::ReduceMax", "onnx::Cast"]
    assert targets[-1] == onnx.TensorProto.FLOAT
    assert in_float32 or targets[0] == onnx.TensorProto.BFLOAT16
