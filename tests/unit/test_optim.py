"""FusedAdam and FP16_Optimizer against float64, as far as a CPU can run them; a run names what made its steps."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engine import ort_optimizers
from ortlab.errors import InstallError, OptionError, StepError
from ortlab.optim import FusedAdam, fp16_optimizer, fused_adam
from ortlab.records.runs import Run, optimizer_name
from ortlab.render import text

MODES = (0, 1, 2)


class Reference:
    """Adam in float64, as ``multi_tensor_adam.cu`` and ``fused_adam.py`` of 1.19.2 write it down."""

    def __init__(self, values, *, lr, mode, bias_correction, weight_decay, eps=1e-6, betas=(0.9, 0.999)):
        self.values = [value.double().clone() for value in values]
        self.means = [torch.zeros_like(value) for value in self.values]
        self.squares = [torch.zeros_like(value) for value in self.values]
        self.lr, self.mode, self.corrects, self.decay = lr, mode, bias_correction, weight_decay
        self.eps, self.betas, self.count = eps, betas, 0

    def step(self, gradients):
        self.count += 1
        first, second = self.betas
        correction1 = 1 - first**self.count if self.corrects else 1.0
        correction2 = 1 - second**self.count if self.corrects else 1.0
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            value, slope = self.values[index], gradient.double()
            if self.mode == 0:
                slope = slope + self.decay * value
            if self.mode == 2:
                value = value - value * self.lr * self.decay
            mean = self.means[index] = first * self.means[index] + (1 - first) * slope
            square = self.squares[index] = second * self.squares[index] + (1 - second) * slope * slope
            if self.mode == 2:
                root = square.sqrt() / math.sqrt(correction2) + self.eps
                value = value - self.lr * mean / (correction1 * root)
            else:
                lr = self.lr * math.sqrt(correction2) / correction1
                value = value - lr * mean / (square.sqrt() + self.eps)
            if self.mode == 1:
                value = value - self.lr * self.decay * value
            self.values[index] = value


def parameters(dtype=torch.float32):
    draw = torch.Generator().manual_seed(11)
    return [
        nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((7, 5), (5,), (3, 4, 2), ())
    ]


def gradients_of(held, step, dtype, *, missing=()):
    """Draw gradients from large to far below eps, where the two places of eps differ; some are absent."""
    draw = torch.Generator().manual_seed(100 + step)
    scales = (1.0, 1e-3, 1e-6, 1e-2)
    return [
        None if index in missing else (scale * torch.randn(one.shape, generator=draw)).to(dtype)
        for index, (one, scale) in enumerate(zip(held, scales, strict=True))
    ]


def steps_of(optimizer, held, count, dtype, first=0):
    for step in range(first, first + count):
        gradients = gradients_of(held, step, dtype, missing=(1,) if step == 2 else ())
        for one, gradient in zip(held, gradients, strict=True):
            one.grad = gradient
        optimizer.step()


@pytest.mark.row("G1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_six_steps_of_two_groups_are_those_of_float64(mode, bias_correction, dtype, tolerance):
    held = parameters(dtype)
    groups = [
        {"params": held[:2], "weight_decay": 0.3},
        {"params": held[2:], "lr": 3e-2, "betas": (0.8, 0.95)},
    ]
    optimizer = fused_adam(groups, lr=1e-2, adam_w_mode=mode, bias_correction=bias_correction)
    shared = {"mode": mode, "bias_correction": bias_correction}
    references = [
        Reference(held[:2], lr=1e-2, weight_decay=0.3, **shared),
        Reference(held[2:], lr=3e-2, weight_decay=0.0, betas=(0.8, 0.95), **shared),
    ]
    start = [one.detach().clone() for one in held]

    for step in range(6):
        steps_of(optimizer, held, 1, dtype, first=step)
        gradients = gradients_of(held, step, dtype, missing=(1,) if step == 2 else ())
        references[0].step(gradients[:2])
        references[1].step(gradients[2:])

    expected = [*references[0].values, *references[1].values]
    for one, reference, before in zip(held, expected, start, strict=True):
        moved = (reference - before.double()).abs().max()
        assert moved > 1e-3  # else nothing has been tested
        assert (one.double() - reference).abs().max() <= tolerance * max(1.0, reference.abs().max())


def test_another_decay_mode_would_be_noticed():
    ends = []
    for mode in MODES:
        held = parameters()
        steps_of(fused_adam(held, lr=1e-2, adam_w_mode=mode, weight_decay=0.3), held, 5, torch.float32)
        ends.append(torch.cat([one.detach().flatten() for one in held]))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (ends[one] - ends[other]).abs().max() > 1e-4


def test_mode_2_is_the_adamw_of_torch():
    held, theirs = parameters(), parameters()
    # From step 3 on, where every parameter has its gradient: torch counts the steps of each parameter by itself.
    steps_of(
        fused_adam(held, lr=1e-2, eps=1e-8, adam_w_mode=2, weight_decay=0.1), held, 5, torch.float32, first=3
    )
    steps_of(
        torch.optim.AdamW(theirs, lr=1e-2, eps=1e-8, weight_decay=0.1), theirs, 5, torch.float32, first=3
    )
    for one, other in zip(held, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_is_computed_in_float32_and_kept_in_float16(mode):
    value = nn.Parameter(torch.linspace(-2, 2, 33).half())
    gradient = torch.linspace(1, -1, 33).half()
    value.grad = gradient.clone()
    reference = Reference([value.detach()], lr=1e-2, mode=mode, bias_correction=True, weight_decay=0.3)
    optimizer = fused_adam([value], lr=1e-2, adam_w_mode=mode, weight_decay=0.3)
    optimizer.step()
    reference.step([gradient])
    assert optimizer.state[value]["exp_avg"].dtype == torch.float16
    # The decay of mode 1 and 2 is a rounding of its own here: two roundings of 2 ** -11.
    torch.testing.assert_close(value.detach().double(), reference.values[0], rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_state_goes_on_bit_for_bit_and_is_that_of_ort(mode):
    held = parameters()
    optimizer = fused_adam(held, lr=1e-2, adam_w_mode=mode, weight_decay=0.1)
    steps_of(optimizer, held, 3, torch.float32)
    saved, middle = copy.deepcopy(optimizer.state_dict()), [one.detach().clone() for one in held]
    steps_of(optimizer, held, 3, torch.float32, first=3)

    other = [nn.Parameter(one.clone()) for one in middle]
    again = fused_adam(other, lr=1.0, adam_w_mode=mode)
    again.load_state_dict(copy.deepcopy(saved))
    steps_of(again, other, 3, torch.float32, first=3)
    assert all(torch.equal(one, theirs) for one, theirs in zip(held, other, strict=True))

    upstream = [nn.Parameter(one.clone()) for one in middle]
    by_ort = ort_fused_adam_on_cpu()(upstream, mode)
    by_ort.load_state_dict(copy.deepcopy(saved))
    steps_of(by_ort, upstream, 3, torch.float32, first=3)
    assert all(torch.equal(one, theirs) for one, theirs in zip(held, upstream, strict=True))
    assert by_ort.state_dict()["param_groups"][0]["step"] == 6


def ort_fused_adam_on_cpu():
    """Return ORT's own class with the stand-in for its extension; only its buffer on the GPU is left out."""
    from ortlab import engine

    engine.load()
    from onnxruntime.training.optim import FusedAdam as Upstream
    from onnxruntime.training.optim._multi_tensor_apply import MultiTensorApply

    class OnCpu(Upstream):
        def __init__(self, params, mode):
            defaults = {
                "lr": 1.0,
                "bias_correction": True,
                "betas": (0.9, 0.999),
                "eps": 1e-6,
                "weight_decay": 0.0,
            }
            torch.optim.Optimizer.__init__(self, params, defaults)
            self._adam_w_mode, self._set_grad_none, self._dummy_overflow_buf = mode, True, None
            self._multi_tensor_adam = ort_optimizers.multi_tensor_adam
            self._multi_tensor_applier = MultiTensorApply(2048 * 32)
            self._TorchTensorVector = ort_optimizers.TorchTensorVector

    return OnCpu


def test_gradients_are_dropped_unless_asked_for_otherwise():
    held = parameters()
    for one in held:
        one.grad = torch.ones_like(one)
    optimizer = fused_adam(held, set_grad_none=False)
    optimizer.zero_grad(set_to_none=False)
    assert all(one.grad is not None and not one.grad.any() for one in held)
    fused_adam(held).zero_grad(set_to_none=False)
    assert all(one.grad is None for one in held)


def test_a_closure_computes_the_loss_with_gradients():
    value = nn.Parameter(torch.tensor(2.0))
    optimizer = fused_adam([value], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = value**2
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert value.item() == pytest.approx(1.5, abs=1e-4)


def test_a_sparse_gradient_changes_nothing():
    table, dense = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2))
    before = copy.deepcopy(table.weight.detach())
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    optimizer = fused_adam([{"params": [dense]}, {"params": list(table.parameters())}])
    with pytest.raises(StepError, match="no sparse gradients"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    assert torch.equal(dense, torch.ones(2))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"lr": -1.0}, "lr cannot be -1.0"),
        ({"lr": math.nan}, "lr cannot be nan"),
        ({"betas": (0.9, 1.0)}, "betas cannot be 1.0"),
        ({"betas": (0.9,)}, "betas cannot be"),
        ({"eps": "small"}, "eps cannot be 'small'"),
        ({"weight_decay": -0.1}, "weight_decay cannot be -0.1"),
        ({"adam_w_mode": 3}, "adam_w_mode cannot be 3"),
        ({"adam_w_mode": "torch"}, "adam_w_mode cannot be 'torch'"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, what):
    with pytest.raises(OptionError, match=what):
        fused_adam(parameters(), **values)


def test_a_group_is_checked_as_well_and_parameters_must_be_there():
    with pytest.raises(OptionError, match="lr cannot be -2"):
        fused_adam([{"params": parameters(), "lr": -2}])
    for nothing in ([], nn.ReLU().parameters(), [{"params": []}]):
        with pytest.raises(OptionError, match="no parameter to train"):
            fused_adam(nothing)
    with pytest.raises(OptionError, match="not a Parameter"):
        fused_adam(parameters()[0])


@pytest.mark.row("G1")
def test_a_run_names_what_made_its_steps(experiment):
    lab = ortlab.wrap(experiment.model)
    experiment.optimizer = fused_adam(experiment.model.parameters(), lr=1e-2)
    run = lab.step(experiment.step, n=3, progress=False)
    (name,) = run.optimizers
    assert name == (
        "FusedAdam by PyTorch's fused kernel: the parameters are on cpu, and ORT's kernel is for CUDA"
    )
    assert name in text.render(run)
    assert Run.from_dict(run.to_dict()).optimizers == run.optimizers
    older = run.to_dict()
    del older["optimizers"]
    assert Run.from_dict(older).optimizers == ()
    again = lab.rerun(progress=False)
    assert again.losses == run.losses
    assert again.start_digest == run.start_digest
    lab.unwrap()


def test_what_the_user_asked_torch_for_is_in_the_name():
    held = parameters()
    assert optimizer_name(torch.optim.AdamW(held)) == "AdamW"
    assert optimizer_name(torch.optim.AdamW(held, fused=True)) == "AdamW, fused"
    assert optimizer_name(torch.optim.SGD(held, lr=1.0, foreach=True)) == "SGD, foreach"
    assert isinstance(fused_adam(held), FusedAdam)


# ---- FP16_Optimizer: the four functions of the extension, and the two repairs ----------------------------------------


@pytest.mark.row("G2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_norm_of_many_tensors_is_that_of_float64(dtype):
    draw = torch.Generator().manual_seed(5)
    tensors = [(300 * torch.randn(size, generator=draw)).to(dtype) for size in (40_000, 3, 1)]
    norm, norms = ort_optimizers.multi_tensor_l2norm(2048 * 32, None, [tensors], True)
    expected = torch.stack([one.double().norm() for one in tensors])
    assert norm.shape == (1,)
    assert norm.dtype == norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(norm.double(), expected.norm().reshape(1), rtol=1e-5, atol=0)
    assert ort_optimizers.multi_tensor_l2norm(1, None, [tensors])[1].shape == (0,)


@pytest.mark.row("G3")
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_gradients_of_float16_are_unscaled_into_those_of_the_masters(bad):
    draw = torch.Generator().manual_seed(6)
    halves = [nn.Parameter(torch.zeros(5, dtype=torch.float16)) for _ in range(3)]
    masters = [nn.Parameter(torch.zeros(5)) for _ in range(3)]
    raw = [(64 * torch.randn(5, generator=draw)).half() for _ in range(2)]
    halves[0].grad, halves[1].grad = raw[0].clone(), raw[1].clone()
    if bad is not None:
        halves[1].grad[3] = bad
    masters[1].grad, masters[2].grad = torch.full((5,), 0.5), torch.ones(5)
    overflow = torch.zeros(1, dtype=torch.int32)

    ort_optimizers.unscale_fp16_grads_into_fp32_grads(halves, masters, overflow, 128.0)

    torch.testing.assert_close(masters[0].grad.double(), raw[0].double() / 128, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        masters[1].grad[:3].double(), 0.5 + raw[1][:3].double() / 128, rtol=1e-6, atol=0
    )
    assert torch.equal(masters[2].grad, torch.ones(5))
    assert bool(overflow.item()) == (bad is not None)


def test_scaling_writes_into_the_second_list_and_keeps_an_earlier_overflow():
    source, target = torch.tensor([1.0, -2.0]).half(), torch.zeros(2)
    overflow = torch.zeros(1, dtype=torch.int32)
    ort_optimizers.multi_tensor_scale(1, overflow, [[source], [target]], 0.25)
    assert target.tolist() == [0.25, -0.5]
    assert overflow.item() == 0
    ort_optimizers.multi_tensor_scale(1, overflow, [[torch.tensor([float("inf")])], [torch.zeros(1)]], 1.0)
    ort_optimizers.multi_tensor_scale(1, overflow, [[source], [target]], 1.0)
    assert overflow.item() == 1


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write modules of a library that is not installed into a folder on the path; forget them afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(files):
        for name, source in files.items():
            path = tmp_path.joinpath(*name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents:
                if folder.parts:
                    (tmp_path / folder / "__init__.py").touch()
            path.with_suffix(".py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {"deepspeed", "megatron"}:
            del sys.modules[name]


def deepspeed(library, version):
    """Write DeepSpeed's ZeRO optimizer of 0.9.2, whose source ORT carries to compare with the installed one."""
    from ortlab import engine

    engine.load()
    from onnxruntime.training.optim import _ds_code_store

    source = inspect.getsource(_ds_code_store.Stage1And2_DeepSpeedZeroOptimizer_0_9_2)
    library(
        {
            "deepspeed.runtime.zero.stage_1_and_2": source.replace(
                "Stage1And2_DeepSpeedZeroOptimizer_0_9_2", "DeepSpeedZeroOptimizer"
            ),
            "deepspeed.accelerator": "class _Cuda:\n    def device_name(self):\n        return 'cuda'\n\n\n"
            "def get_accelerator():\n    return _Cuda()\n",
            "deepspeed.version": "",
        }
    )
    importlib.import_module("deepspeed").__version__ = version
    return importlib.import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer()


@pytest.mark.row("G2")
def test_zero_of_deepspeed_0_9_2_looks_for_overflow_in_one_go(library):
    optimizer = deepspeed(library, "0.9.2")
    assert fp16_optimizer(optimizer) is optimizer

    held = parameters()
    for one in held[1:]:
        one.grad = torch.ones_like(one)
    assert not optimizer.has_overflow_serial(held)
    held[3].grad = torch.tensor(float("nan"))
    assert optimizer.has_overflow_serial(held)

    optimizer.bit16_groups = [held[:2], held[2:]]
    optimizer.averaged_gradients = {0: [torch.ones(3), None], 1: [torch.zeros(2)]}
    assert not optimizer.has_overflow_partitioned_grads_serial()
    optimizer.averaged_gradients[1][0][1] = float("inf")
    assert optimizer.has_overflow_partitioned_grads_serial()

    assert optimizer.get_grad_norm_direct.__func__.__module__ == "onnxruntime.training.optim._ds_modifier"
    assert "FP16_Optimizer by PyTorch's operators over lists" in optimizer_name(optimizer)


def test_a_deepspeed_that_1_19_2_does_not_know_is_an_error_and_stays_as_it_is(library):
    optimizer = deepspeed(library, "0.17.0")
    type(optimizer).has_overflow_serial = lambda self, params, other: False  # noqa: ARG005 - another source
    before = dict(vars(optimizer))
    with pytest.raises(InstallError, match="cannot be changed; it has been left as it is") as caught:
        fp16_optimizer(optimizer)
    assert "0.17.0" in caught.value.why
    assert "deepspeed<=0.9.2" in caught.value.fix
    assert vars(optimizer) == before


MEGATRON = """
class FP16_Optimizer:
    def __init__(self, optimizer, fp16_groups, fp32_from_fp32_groups):
        self.optimizer, self.overflow = optimizer, False
        self.fp16_groups, self.fp32_from_fp32_groups = fp16_groups, fp32_from_fp32_groups

    def _check_overflow(self):
        raise NotImplementedError

    def clip_master_grads(self, max_norm, norm_type=2):
        raise NotImplementedError
"""


@pytest.mark.row("G4")
@pytest.mark.parametrize("norm_type", [2, math.inf, 3])
def test_megatron_clips_and_looks_for_overflow(library, norm_type):
    library({"megatron.fp16.fp16": MEGATRON})
    held = parameters()
    draw = torch.Generator().manual_seed(9)
    for one in held[1:]:
        one.grad = torch.randn(one.shape, generator=draw)
    flat = torch.cat([one.grad.double().flatten() for one in held[1:]])
    expected = torch.linalg.vector_norm(flat, norm_type)
    made = importlib.import_module("megatron.fp16.fp16").FP16_Optimizer
    optimizer = fp16_optimizer(made(fused_adam(held), [held[:2]], [held[2:]]))

    assert not optimizer._check_overflow()
    assert optimizer.clip_master_grads(0.5, norm_type) == pytest.approx(expected.item(), rel=1e-5)
    # 1.19.2 gives the norm back and has clipped nothing.
    clipped = torch.cat([one.grad.double().flatten() for one in held[1:]])
    torch.testing.assert_close(clipped, flat * 0.5 / (expected + 1e-6), rtol=1e-5, atol=1e-8)
    held[3].grad = torch.tensor(float("inf"))
    assert optimizer._check_overflow()
    assert optimizer.clip_master_grads(0.5, norm_type) == -1
    assert optimizer_name(optimizer.optimizer).endswith("FP16_Optimizer by PyTorch's operators over lists")


@pytest.mark.row("G2")
@pytest.mark.row("G3")
def test_without_deepspeed_and_apex_the_next_step_is_named():
    optimizer = torch.optim.AdamW(parameters())
    before = dict(vars(optimizer))
    with pytest.raises(
        OptionError, match=r"cannot change a torch.optim.adamw.AdamW; it has been left"
    ) as caught:
        fp16_optimizer(optimizer)
    assert "deepspeed.initialize" in caught.value.fix
    assert "opt_level='O2'" in caught.value.fix
    assert vars(optimizer) == before

    optimizer._amp_activations = object()  # what apex.amp.initialize leaves on an optimizer
    with pytest.raises(InstallError, match="Apex is not installed") as caught:
        fp16_optimizer(optimizer)
    assert "github.com/NVIDIA/apex" in caught.value.fix
