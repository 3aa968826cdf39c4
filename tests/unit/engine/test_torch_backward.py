"""What PyTorch's kernels compute in the backward is what ONNX Runtime's compute, and takes no other memory."""

from __future__ import annotations

import copy
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional as F

import ortlab
from ortlab.engine.operators.torch_kernels import SMALLEST_KEPT, OutputBuffers, empty
from ortlab.engine.passes.training_graph import drop_empty_sums, drop_expansions

if TYPE_CHECKING:
    from ortlab.graphs import Graph

TOLERANCE = 1e-5
WIDTH, CLASSES = 256, 300


class Tied(nn.Module):
    """A language model of one block, whose head is its embedding; returns loss, scores and hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, padding_idx=3)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor):
        x = self.embedding(ids)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        x = self.norm(x + self.narrow(F.gelu(self.wide(x))))
        scores = F.linear(x, self.embedding.weight, self.bias)
        return F.cross_entropy(scores.view(-1, CLASSES), labels.view(-1)), scores, x


def batch(size: int = 4, length: int = 16):
    ids = torch.randint(CLASSES, (size, length), generator=torch.Generator().manual_seed(5))
    ids[:, :2] = 3  # padding
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return ids, mask, torch.where(ids % 5 == 0, -100, ids)


def differences(expected: nn.Module, actual: nn.Module) -> dict[str, float]:
    pairs = zip(expected.named_parameters(), actual.parameters(), strict=True)
    return {
        name: float((one.grad - two.grad).abs().max() / one.grad.abs().max().clamp(min=1e-6))
        for (name, one), two in pairs
    }


def in_double(module: nn.Module) -> nn.Module:
    """Copy a module; on some processors PyTorch's own gradients of float32 are as far from these as is allowed."""
    return copy.deepcopy(module).double()


def trained(module: nn.Module, call: object, options: ortlab.Options, steps: int = 2, copied=copy.deepcopy):
    """Run a step on PyTorch, and steps of the same on ORT; return both modules and the lab, still wrapped."""
    expected = copied(module)
    call(expected).backward()
    lab = ortlab.wrap(module, options=options)
    for _ in range(steps):
        module.zero_grad()
        call(module).backward()
    assert lab.status.executed_by == "ort"
    return expected, module, lab


def kernels(graph: Graph) -> set[str]:
    found = {
        attribute.s.decode()
        for node in graph.model.graph.node
        for attribute in node.attribute
        if attribute.name == "operator"
    }
    return {name.removeprefix("ortlab::") for name in found if name.startswith("ortlab::")}


LOSSES = {
    "loss": lambda loss, scores, hidden: loss,  # noqa: ARG005
    "loss and scores": lambda loss, scores, hidden: loss + scores.square().mean(),  # noqa: ARG005
    "all outputs": lambda loss, scores, hidden: loss + scores.square().mean() + hidden.sin().sum(),
    "no loss": lambda loss, scores, hidden: scores.cos().sum(),  # noqa: ARG005
}


@pytest.mark.parametrize("aten_cross_entropy", [True, False])
@pytest.mark.parametrize("which", LOSSES)
def test_gradients_agree_with_pytorch(which, aten_cross_entropy):
    torch.manual_seed(1)
    options = ortlab.Options(aten_cross_entropy=aten_cross_entropy)
    arguments = batch()
    expected, actual, lab = trained(
        Tied(), lambda module: LOSSES[which](*module(*arguments)), options, copied=in_double
    )
    found = differences(expected, actual)
    chosen = kernels(lab.graph("gradient"))
    lab.unwrap()
    assert max(found.values()) <= TOLERANCE, found
    assert {"matmul", "matmul_transposed", "matmul_of_rows"} & chosen == {"matmul", "matmul_of_rows"}
    assert {
        "layer_norm_backward",
        "gelu_backward",
        "softmax_backward_over",
        "add_embedding_gradient",
    } <= chosen
    assert ("cross_entropy_backward" in chosen) is aten_cross_entropy


def test_each_step_may_use_other_outputs(wrap):
    torch.manual_seed(1)
    module = Tied()
    expected = in_double(module)
    wrap(module)
    for which in (*LOSSES, *reversed(LOSSES)):
        for side in (expected, module):
            side.zero_grad()
            LOSSES[which](*side(*batch())).backward()
        assert max(differences(expected, module).values()) <= TOLERANCE


def test_off_leaves_all_to_ort():
    torch.manual_seed(1)
    options = ortlab.Options(aten_backward=False, aten_cross_entropy=False)
    expected, actual, lab = trained(Tied(), lambda module: module(*batch())[0], options)
    chosen = kernels(lab.graph("gradient"))
    lab.set(aten_backward=True)
    module = lab.module
    module.zero_grad()
    module(*batch())[0].backward()
    switched_on = kernels(lab.graph("gradient"))
    found = differences(expected, actual)
    lab.unwrap()
    assert chosen <= {"add"}  # of what is returned, so that nothing writes over it
    assert "matmul_of_rows" in switched_on
    assert max(found.values()) <= TOLERANCE


def test_small_layers_are_left_to_ort(wrap):
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    lab = wrap(module)
    lab.module(torch.randn(3, 8)).sum().backward()
    chosen = kernels(lab.graph("gradient"))
    assert chosen == {"sum_over"}  # for their digits, not for their speed: see `exact_choice`


@pytest.mark.parametrize(("rows", "by_torch"), [(8, False), (65_536, True)])
def test_small_layers_of_many_rows_are_given_to_torch(rows, by_torch, wrap):
    """The rows are those of the first batch, also behind a Pad, whose sizes shape inference does not know."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x):
            x = F.pad(x, (0, 0, 0, x.shape[0] % 2))
            return self.narrow(F.gelu(self.wide(x.reshape(-1, 24))))

    torch.manual_seed(2)
    module, x = Padded(), torch.randn(rows // 4, 4, 24)
    expected, actual, lab = trained(module, lambda module: module(x).square().mean(), ortlab.Options())
    chosen = kernels(lab.graph("gradient")) & {"matmul", "matmul_of_rows"}
    lab.unwrap()
    assert chosen == ({"matmul", "matmul_of_rows"} if by_torch else set())
    assert max(differences(expected, actual).values()) <= TOLERANCE


def test_memory_plans_are_the_same_and_can_be_applied():
    torch.manual_seed(1)
    plans = {}
    for switch in (True, False):
        options = ortlab.Options(aten_backward=switch)
        *_, lab = trained(Tied(), lambda module: module(*batch())[0], options)
        plans[switch] = lab.plan().rows
        if switch:
            module = lab.module
            expected = copy.deepcopy([parameter.grad for parameter in module.parameters()])
            lab.set(memory_plan=tuple(f"{row.cluster}:1:-1" for row in plans[True] if row.strategy == 1)[:2])
            module.zero_grad()
            module(*batch())[0].backward()
            assert lab.options.memory_plan
            for parameter, before in zip(module.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, before)
        lab.unwrap()
    assert plans[True]
    assert plans[True] == plans[False]


@pytest.mark.parametrize("turned", [True, False], ids=["transposed", "plain"])
def test_products_of_matrices_without_a_batch(turned):
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(WIDTH, 2 * WIDTH) if turned else torch.randn(2 * WIDTH, WIDTH)
            )

        def forward(self, x):
            return (x.tanh() @ (self.weight.t() if turned else self.weight)).sin().sum()

    x = torch.randn(5, 2 * WIDTH, requires_grad=True)
    expected, actual, lab = trained(Product(), lambda module: module(x), ortlab.Options())
    lab.unwrap()
    assert max(differences(expected, actual).values()) <= TOLERANCE


# --- cross entropy ----------------------------------------------------------------------------------------------


class Scores(nn.Module):
    def __init__(self, labels, classes=CLASSES, **loss):
        super().__init__()
        self.scores = nn.Linear(8, classes)
        self.register_buffer("weight", loss.pop("weight", None))
        self.register_buffer("labels", labels)
        self.loss = loss

    def forward(self, x):
        return F.cross_entropy(self.scores(x), self.labels, weight=self.weight, **self.loss)


LABELS = torch.tensor([0, 4, -100, 299, 1, 1])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("labels", "more"),
    [
        (LABELS, {}),
        (LABELS, {"weight": torch.rand(CLASSES)}),
        (LABELS.clamp(min=0), {"ignore_index": 4}),
        (torch.full((6,), -100), {}),
    ],
    ids=["plain", "weighted", "ignore_index", "all ignored"],
)
def test_cross_entropy_agrees_with_pytorch(labels, more, reduction):
    torch.manual_seed(3)
    x, outer = torch.randn(6, 8), torch.randn(6)
    losses = []

    def call(module):
        loss = module(x)
        losses.append(loss.detach())
        return (loss * outer).sum() if reduction == "none" else loss

    expected, actual, lab = trained(Scores(labels, reduction=reduction, **more), call, ortlab.Options())
    chosen = kernels(lab.graph("gradient"))
    lab.unwrap()
    assert {"cross_entropy", "cross_entropy_backward"} <= chosen
    torch.testing.assert_close(losses[-1], losses[0], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    for one, two in zip(expected.parameters(), actual.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def test_few_classes_and_images_are_left_to_ort():
    few = Scores(LABELS.clamp(-100, 7), classes=8)

    class Image(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Conv2d(3, CLASSES, 1)

        def forward(self, x):
            return F.cross_entropy(self.scores(x), (x[:, 0] > 0).long())

    for module, x in ((few, torch.randn(6, 8)), (Image(), torch.randn(2, 3, 4, 4))):
        expected, actual, lab = trained(module, lambda one, x=x: one(x), ortlab.Options())
        chosen = kernels(lab.graph("gradient"))
        lab.unwrap()
        assert "cross_entropy" not in chosen
        assert max(differences(expected, actual).values()) <= TOLERANCE


def test_few_classes_of_many_rows_are_left_to_torch():
    few = Scores((torch.arange(2**12) % 8), classes=8)
    expected, actual, lab = trained(
        few,
        lambda one: one(torch.randn(2**12, 8, generator=torch.Generator().manual_seed(3))),
        ortlab.Options(),
    )
    assert "cross_entropy" in kernels(lab.graph("gradient"))
    lab.unwrap()
    assert max(differences(expected, actual).values()) <= TOLERANCE


class Sparse(nn.Module):
    """A loss that is a module of its own, where label sparsity acts."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(8, CLASSES)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        return self.loss(self.scores(x), labels)


@pytest.mark.parametrize(("ignored", "by_torch"), [(4, False), (0, True)])
def test_where_label_sparsity_acts_the_loss_is_left_to_ort(ignored, by_torch, capfd):
    x, labels = torch.randn(6, 8), torch.arange(6)
    labels[:ignored] = -100
    expected, actual, lab = trained(Sparse(), lambda module: module(x, labels), ortlab.Options())
    chosen = kernels(lab.graph("gradient"))
    lab.unwrap()
    capfd.readouterr()
    assert ("cross_entropy" in chosen) is by_torch
    assert max(differences(expected, actual).values()) <= TOLERANCE


def test_a_label_out_of_range_is_refused(wrap):
    module = Scores(torch.tensor([0, 1, 2, 3, 4, CLASSES]))
    lab = wrap(module)
    with pytest.raises(ortlab.OrtlabError, match="out of bounds"):
        lab.module(torch.randn(6, 8))


# --- memory -----------------------------------------------------------------------------------------------------


def test_memory_is_used_again_once_nothing_holds_it():
    buffers, like = OutputBuffers(), torch.empty(0)
    shape = (4, SMALLEST_KEPT // 16)
    with buffers.in_use():
        first = empty(shape, like)
        second = empty(shape, like)
        assert first.data_ptr() != second.data_ptr()
        address, view = first.data_ptr(), first.view(-1)
        del first
        assert empty(shape, like).data_ptr() not in {address, second.data_ptr()}
        del view
        again = empty(shape, like)
    assert again.data_ptr() == address
    assert again.shape == shape
    assert buffers.size == 3 * again.untyped_storage().nbytes()
    assert empty(shape, like).data_ptr() != address  # outside of a run


def test_memory_of_shapes_that_no_longer_come_is_let_go():
    buffers, like = OutputBuffers(), torch.empty(0)
    for length in range(1, 40):
        with buffers.in_use():
            empty((length, SMALLEST_KEPT), like)
    assert buffers.size <= 8 * 40 * SMALLEST_KEPT * 4


_SMALL_STEPS = """
import resource
import torch
import ortlab

layers = [layer for _ in range(6) for layer in (torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16))]
model, x = torch.nn.Sequential(*layers), torch.randn(8, 16, 56, 56)
lab = ortlab.wrap(model, log_level="ERROR")

def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        model(x).sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps

faults(10)
print(min(faults(5) for _ in range(4)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory by other rules")
def test_small_steps_get_no_new_pages_from_the_system():
    # Each step has some 25 MB of outputs, none of them above 2 MB: without `keep_heap` it gets thousands of new pages.
    run = subprocess.run([sys.executable, "-c", _SMALL_STEPS], capture_output=True, text=True, check=True)
    assert float(run.stdout.splitlines()[-1]) < 100


def test_gradients_that_the_user_keeps_are_not_overwritten(wrap):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))
    lab = wrap(module)
    kept, copies = [], []
    for _ in range(4):
        lab.module(torch.randn(3, 512)).square().sum().backward()
        kept += [parameter.grad for parameter in module.parameters()]
        copies += [parameter.grad.clone() for parameter in module.parameters()]
        module.zero_grad(set_to_none=True)
    for gradient, copied in zip(kept, copies, strict=True):
        torch.testing.assert_close(gradient, copied, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(7,), (3, 17, 33), (2, 4, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_masked_softmax_gradient_needs_one_buffer(shape, dtype):
    """The masked gradient lies in the memory of the result: a kernel of torch reads each row before it writes it."""
    from ortlab.engine.operators.torch_kernels import softmax_backward

    generator = torch.Generator().manual_seed(5)
    grad, scores = (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(2))
    mask = torch.rand(shape, generator=generator) < 0.3
    probabilities, given = scores.softmax(-1), grad.clone()
    expected = torch.ops.aten._softmax_backward_data(grad.masked_fill(mask, 0.0), probabilities, -1, dtype)
    assert torch.equal(softmax_backward(grad, probabilities, mask), expected)
    assert torch.equal(grad, given)


def sums_over_asked_axes(graph):
    """Yield the operand that a sum is the gradient of, and the other one, where ORT asks in each step for the axes."""
    producers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for asked in (producers[name] for name in node.input if name in producers):
            if asked.op_type == "BroadcastGradientArgs":
                operands = [producers[shape].input[0] for shape in asked.input]
                yield operands if asked.output[0] in node.input else operands[::-1]


def test_the_gradient_of_a_product_is_not_summed_for_the_bias_behind_it():
    """Swin joins values whose sizes ONNX Runtime cannot compare before a step."""
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "window_size": 4}
    config = transformers.SwinConfig(
        depths=[2, 1], num_heads=[1, 2], num_labels=3, drop_path_rate=0.0, **sizes
    )
    torch.manual_seed(0)
    x, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 2])
    expected, actual, lab = trained(
        transformers.SwinForImageClassification(config),
        lambda model: model(x, labels=labels).loss,
        ortlab.Options(),
    )
    graph = lab.graph("gradient").model.graph
    lab.unwrap()
    assert max(differences(expected, actual).values()) < TOLERANCE * 10
    products = {node.output[0] for node in graph.node if node.op_type == "MatMul"}
    biases = {value.name for value in graph.input if value.name.endswith(".bias")}
    pairs = list(sums_over_asked_axes(graph))
    assert any(own in biases and other in products for own, other in pairs)
    assert not any(own in products and other in biases for own, other in pairs)


class Means(nn.Module):
    """A normalisation that is written out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12))

    def forward(self, x):
        x = x * self.weight
        return x / ((x * x).mean(-1, keepdim=True) + 1).sqrt()


def test_the_gradient_of_a_mean_is_not_copied_to_each_entry():
    def call(module):
        return sum(module(torch.linspace(-1, 2, size * 60).view(size, 5, 12)).sum() for size in (3, 4))

    expected, actual, lab = trained(Means(), call, ortlab.Options())
    graph = lab.graph("gradient").model.graph
    lab.unwrap()
    assert max(differences(expected, actual).values()) <= TOLERANCE
    products = {name for node in graph.node if node.op_type == "Mul" for name in node.input}
    assert not any(node.op_type == "Expand" and node.output[0] in products for node in graph.node)


class Readers(nn.Module):
    """Six layers that read one value, each behind another; the value may be returned as well."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.returned = returned

    def forward(self, x):
        read = self.first(x).tanh()
        h = read.sin()
        for layer in self.layers:
            h = h + layer(h * read).tanh()
        return (h, read) if self.returned else h


@pytest.mark.parametrize("loss", ["h", "both"])
@pytest.mark.parametrize("returned", [False, True])
def test_the_parts_of_a_gradient_are_added_as_they_come(returned, loss):
    """ORT adds them at the end, and keeps each up to there."""
    torch.manual_seed(4)
    x = torch.randn(40, 8)

    def call(module):
        outputs = module(x) if returned else (module(x),) * 2
        h, read = (one.square().sum() for one in outputs)
        return h if loss == "h" else h + read

    expected, actual, lab = trained(Readers(returned), call, ortlab.Options())
    nodes = lab.graph("gradient").model.graph.node
    lab.unwrap()
    assert not any(node.op_type == "Sum" for node in nodes)
    sums = [node for node in nodes if "_of_" in node.name and node.op_type == "Add"]
    assert sums
    read = {name for node in nodes for name in node.input}
    assert all(node.output[0] in read for node in sums)
    made = {name for node in nodes[: list(nodes).index(sums[0])] for name in node.output}
    assert any(not made.issuperset(node.input) for node in sums), "each part is made before the first sum"
    assert max(differences(expected, actual).values()) <= TOLERANCE


def test_onnx_runtime_adds_the_gradient_of_a_residual_in_the_product(ortmodule):
    """Two rows of numbers and a Gemm: what is added goes into the Gemm, and no other sum is left."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Linear(8, 16), nn.Linear(16, 16)

        def forward(self, x):
            h = self.first(x).tanh()
            return h + self.layer(h)

    torch.manual_seed(4)
    x = torch.randn(5, 8)
    expected, actual, lab = trained(Residual(), lambda module: module(x).square().sum(), ortlab.Options())
    stages = {stage: lab.graph(stage).model.graph.node for stage in ("gradient", "execution")}
    lab.unwrap()
    assert [node.op_type for node in stages["gradient"]].count("Sum") == 1
    assert not {"Add", "Sum"} & {
        node.op_type for node in stages["execution"] if any("_grad" in name for name in node.output)
    }
    assert max(differences(expected, actual).values()) <= TOLERANCE


@pytest.mark.parametrize("sizes", [("rows", "rows"), ("rows", "others"), (None, None)])
def test_a_product_broadcasts_only_where_the_other_factor_has_the_shape(sizes):
    make, kind = helper.make_node, TensorProto.FLOAT
    nodes = [
        make("Shape", ["whole"], ["shape"]),
        make("Expand", ["grad", "shape"], ["copied"]),
        make("Mul", ["copied", "other"], ["product"]),
    ]
    shapes = {"grad": [1, 4], "whole": [sizes[0], 4], "other": [sizes[1], 4]}
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info("product", kind, None)]
    graph = helper.make_graph([make("YieldOp", [], ["unread"]), *nodes], "", inputs, outputs)
    model = helper.make_model(graph)
    drop_expansions(model)
    found = [node.op_type for node in model.graph.node]
    assert ("Expand" not in found) is (sizes == ("rows", "rows"))


@pytest.mark.parametrize(
    ("own", "other", "copies"),
    [
        (["rows", 8], [8], True),
        (["rows", None, 8], [], True),
        (["rows", 1], [8], False),
        (["rows", None], [8], False),
        (["rows", 8], [2, 8], False),
        (["rows", 8], ["width"], False),
    ],
)
def test_a_sum_goes_where_it_is_over_no_axis_for_any_batch(own, other, copies):
    make, kind = helper.make_node, TensorProto.FLOAT
    shapes = {"own": own, "other": other, "grad": ["rows", None]}
    nodes = [
        make("Shape", ["own"], ["shape of own"]),
        make("Shape", ["other"], ["shape of other"]),
        make(
            "BroadcastGradientArgs",
            ["shape of own", "shape of other"],
            ["axes", "others"],
            domain="com.microsoft",
        ),
        make("ReduceSum", ["grad", "axes"], ["sum"], noop_with_empty_axes=1),
        make("Reshape", ["sum", "shape of own"], ["found"]),
    ]
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "", inputs, [helper.make_tensor_value_info("found", kind, None)])
    model = helper.make_model(graph)
    drop_empty_sums(model)
    assert [node.op_type for node in model.graph.node].count("ReduceSum") == (not copies)
    assert model.graph.node[-1].input[0] == ("grad" if copies else "sum")


def test_a_model_without_a_gradient_from_outside_is_built(wrap):
    """Then ORT's YieldOp, between forward and backward, has no output."""

    class Constant(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(x)

    module = Constant(4, 4)
    lab = wrap(module)
    assert torch.equal(module(torch.randn(3, 4)), torch.ones(3, 4))
    assert lab.status.executed_by == "ort"


class SharedKeys(nn.Module):
    """Heads that share keys, which are put behind an empty cache and returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 4, bias=False)

    def forward(self, x: torch.Tensor):
        query = self.query(x).unflatten(-1, (8, -1)).transpose(1, 2)
        key = torch.cat([self.key(x).unflatten(-1, (2, -1)).transpose(1, 2)], dim=-2)
        batch, heads, length, width = key.shape
        shared = (
            key[:, :, None].expand(batch, heads, 4, length, width).reshape(batch, 4 * heads, length, width)
        )
        return (query @ shared.transpose(2, 3)).softmax(-1).sin().sum(), key


@pytest.mark.parametrize("both", [False, True])
def test_keys_that_are_returned_are_neither_joined_nor_summed_with_no_gradient(both, wrap):
    torch.manual_seed(1)
    eager, x = SharedKeys(), torch.randn(4, 16, WIDTH)
    module = copy.deepcopy(eager)
    lab = wrap(module)

    def step(one: nn.Module) -> None:
        loss, key = one(x)
        (loss + key.square().sum() if both else loss).backward()

    lab.step(lambda: step(module), n=1, memory=False)
    step(eager)
    assert max(differences(eager, module).values()) < TOLERANCE
    used = [node.operator for node in lab.profile(n=1, progress=False).nodes]
    assert "ortlab::add_output_gradient" in used
    assert not {"Sum", "com.microsoft.SplitTraining"} & set(used)


class Rotary(nn.Module):
    """Turns the halves of what a layer returns, as positions do in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = self.before(x).unflatten(-1, (8, -1)).transpose(1, 2)
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        x = x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
        return self.behind(x.transpose(1, 2).flatten(2)).square().sum()


def test_the_gradient_of_a_rotary_embedding_is_one_call(wrap):
    torch.manual_seed(1)
    module, x, angles = Rotary(), torch.randn(2, 16, WIDTH), torch.randn(1, 1, 16, WIDTH // 8)
    plain = copy.deepcopy(module)
    lab, other = wrap(module), wrap(plain, aten_backward=False)
    lab.step(lambda: module(x, angles).backward(), n=1, memory=False)
    other.step(lambda: plain(x, angles).backward(), n=1, memory=False)
    used, without = (
        [node.operator for node in one.profile(n=1, progress=False).nodes] for one in (lab, other)
    )
    assert "ortlab::rotary_backward" in used
    assert used.count("Neg") == without.count("Neg") - 1
    assert max(differences(plain, module).values()) < TOLERANCE
    eager = Rotary()
    eager.load_state_dict(module.state_dict())
    eager(x, angles).backward()
    assert max(differences(eager, module).values()) < TOLERANCE
