"""ORT's FusedAdam and FP16_Optimizer, and what stands in for their CUDA extension where it is not compiled.

As ORTModule's guidelines use them. `Run.optimizers` names what really made the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, Final, TypeVar

import torch

from ortlab.engine import ort_optimizers
from ortlab.errors import OptionError, StepError

_MODES: Final = (ort_optimizers.L2, ort_optimizers.TRANSFORMERS, ort_optimizers.TORCH)
_ORT_DTYPES: Final = (torch.float16, torch.float32)
_CHUNK: Final = 2048 * 32
_Optimizer = TypeVar("_Optimizer")


class FusedAdam(torch.optim.Optimizer):
    """ORT's FusedAdam by PyTorch's kernels; `fused_adam` makes one where ORT's own cannot run.

    Its arguments, steps and state are those of ``onnxruntime.training.optim.FusedAdam``, so that a state that one has
    saved can be loaded by the other. All parameters of a group are at the same step.

    Parameters
    ----------
    params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, set_grad_none
        As `fused_adam` takes them.
    instead
        Why it is not ORT's kernel, as the end of a sentence.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        adam_w_mode: int = ort_optimizers.TRANSFORMERS,
        set_grad_none: bool = True,
        instead: str = "",
    ) -> None:
        super().__init__(params, defaults)
        self._adam_w_mode = adam_w_mode
        self._set_grad_none = set_grad_none
        self._instead = instead

    @property
    def implementation(self) -> str:
        """Who computes the step, and why it is not ORT's kernel."""
        held = [one for group in self.param_groups for one in group["params"]]
        kernel = (
            "PyTorch's fused kernel" if ort_optimizers.is_fused(held) else "PyTorch's operators over lists"
        )
        return f"{kernel}: {self._instead}" if self._instead else kernel

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop the gradients, or set them to zero where both `set_grad_none` and `set_to_none` are False."""
        super().zero_grad(set_to_none=self._set_grad_none or set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Parameters
        ----------
        closure
            Computes the loss and its gradients anew; None uses the gradients that are there.

        Returns
        -------
        object
            What `closure` returned.

        Raises
        ------
        StepError
            If a gradient is sparse. No parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if any(one.grad is not None and one.grad.is_sparse for one in group["params"]):
                raise StepError(
                    "FusedAdam takes no sparse gradients.",
                    fix="Use torch.nn.Embedding(..., sparse=False), or torch.optim.SparseAdam for these parameters.",
                )
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        parameters = [one for one in group["params"] if one.grad is not None]
        for one in parameters:
            if not self.state[one]:
                self.state[one].update(exp_avg=torch.zeros_like(one), exp_avg_sq=torch.zeros_like(one))
        if not parameters:
            return
        lists = [[one.grad for one in parameters], parameters]
        beta1, beta2 = group["betas"]
        lists += [[self.state[one][name] for one in parameters] for name in ("exp_avg", "exp_avg_sq")]
        ort_optimizers.multi_tensor_adam(
            _CHUNK,
            None,
            lists,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["step"],
            self._adam_w_mode,
            int(group["bias_correction"]),
            group["weight_decay"],
        )


def fused_adam(
    params: Iterable[Any],
    lr: float = 1e-3,
    *,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    adam_w_mode: int = ort_optimizers.TRANSFORMERS,
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Make ORT's FusedAdam where its CUDA extension is compiled, and the same steps by PyTorch's kernels elsewhere.

    Which of the two it is stands in `implementation`, and in each run that it steps in (`Run.optimizers`). Beside
    rounding, both compute the same; a state that one has saved can be loaded by the other.

    Parameters
    ----------
    params
        Parameters, or groups of them, as every optimizer of torch takes them.
    lr
        Learning rate.
    bias_correction
        Whether the moments are corrected for having started at zero.
    betas
        How much of the first and the second moment a step keeps.
    eps
        Is added to the root of the second moment. In modes 0 and 1, as in transformers' AdamW, before the root is
        corrected: there 1e-8 means less than in torch.
    adam_w_mode
        Where weights decay: 0 in the gradient (Adam with L2), 1 after the step (transformers' AdamW), 2 before it
        (`torch.optim.AdamW`).
    weight_decay
        How much of the weights, times `lr`, a step takes away.
    set_grad_none
        Whether `zero_grad` drops the gradients in any case.

    Returns
    -------
    torch.optim.Optimizer
        ``onnxruntime.training.optim.FusedAdam``, or `FusedAdam`.

    Raises
    ------
    OptionError
        If a value makes no sense, or there is no parameter.

    Examples
    --------
    >>> optimizer = fused_adam(model.parameters(), lr=1e-4, weight_decay=0.01)
    >>> optimizer.implementation
    "PyTorch's fused kernel: the parameters are on cpu, and ORT's kernel is for CUDA"
    """
    defaults = {
        "lr": lr,
        "bias_correction": bias_correction,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    if adam_w_mode not in _MODES or isinstance(adam_w_mode, bool):
        raise OptionError(
            f"adam_w_mode cannot be {adam_w_mode!r}.",
            why="It takes 0 (L2), 1 (decay after the step, as transformers) or 2 (decay before it, as torch).",
            fix="fused_adam(model.parameters(), lr=1e-4, adam_w_mode=2)",
        )
    groups = _groups(params)
    for group in groups:
        _check({**defaults, **group})
    why = _why_not_ort([one for group in groups for one in group["params"]])
    if not why:
        return ort_optimizers.ort_fused_adam(
            groups, **defaults, adam_w_mode=adam_w_mode, set_grad_none=set_grad_none
        )
    return FusedAdam(groups, defaults, adam_w_mode=int(adam_w_mode), set_grad_none=set_grad_none, instead=why)


def fp16_optimizer(optimizer: _Optimizer, **groups: Callable[[], Any]) -> _Optimizer:
    """Let ORT check for overflow, clip and unscale in the optimizer of DeepSpeed ZeRO, Apex O2 or Megatron-LM 1.1.5.

    ``FP16_Optimizer`` of 1.19.2 replaces a few methods of the optimizer, and warns and leaves it as it is where it does
    not know it; here that is an error. Where ORT's extension `fused_ops` is not compiled, PyTorch's kernels compute
    the same.

    Parameters
    ----------
    optimizer
        What ``deepspeed.initialize`` or ``apex.amp.initialize`` returned, or Megatron-LM's own `FP16_Optimizer`.
    **groups
        For Megatron-LM: `get_horizontal_model_parallel_rank` and `get_horizontal_model_parallel_group`.

    Returns
    -------
    object
        The same optimizer.

    Raises
    ------
    InstallError
        If the library that it is said to come from is missing, or of a version that 1.19.2 does not know.
    OptionError
        If it is no such optimizer. It has not been changed then.

    Examples
    --------
    >>> engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    >>> optimizer = fp16_optimizer(optimizer)
    """
    ort_optimizers.modify(optimizer, **groups)
    return optimizer


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    if isinstance(params, (torch.Tensor, dict)) or not isinstance(params, Iterable):
        raise OptionError(
            f"The parameters are a list of tensors or of groups, not a {type(params).__name__}.",
            fix="fused_adam(model.parameters(), lr=1e-4)",
        )
    listed = list(params)
    if listed and not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    groups = []
    for group in listed:
        held = group["params"]
        held = [held] if isinstance(held, torch.Tensor) else list(held)
        groups.append({**group, "params": [one[1] if isinstance(one, tuple) else one for one in held]})
    if not any(group["params"] for group in groups):
        raise OptionError(
            "There is no parameter to train.",
            fix="Give those of a model that has some: fused_adam(model.parameters()).",
        )
    return groups


def _check(values: dict[str, Any]) -> None:
    betas = values["betas"]
    pair = betas if isinstance(betas, (tuple, list)) and len(betas) == len(("mean", "square")) else (betas,)
    numbers = [(name, values[name], math.inf) for name in ("lr", "eps", "weight_decay")]
    numbers += [("betas", beta, 1.0) for beta in pair]
    wrong = [
        f"{name} cannot be {value!r}"
        for name, value, end in numbers
        if not isinstance(value, Real) or not 0 <= float(value) < end
    ]
    if len(pair) == 1:
        wrong.insert(0, f"betas cannot be {betas!r}")
    if wrong:
        raise OptionError(
            f"{wrong[0]}.",
            why="lr, eps and weight_decay are numbers of at least 0; betas are two numbers from 0 to below 1.",
            fix="fused_adam(model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01)",
        )


def _why_not_ort(parameters: list[torch.Tensor]) -> str:
    """Say why ORT's kernel cannot make the steps, as the end of a sentence; "" if it can."""
    elsewhere = next((one.device for one in parameters if one.device.type != "cuda"), None)
    if elsewhere is not None:
        return f"the parameters are on {elsewhere}, and ORT's kernel is for CUDA"
    other = next((one.dtype for one in parameters if one.dtype not in _ORT_DTYPES), None)
    if other is not None:
        return f"ORT's kernel is for float16 and float32, not {str(other).removeprefix('torch.')}"
    if not ort_optimizers.is_compiled():
        return "ORT's extension fused_ops is not compiled"
    return ""
