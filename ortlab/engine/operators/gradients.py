"""Gradients of the ATen operators that `ortlab.engine.operators.symbolics` leaves to torch.

A gradient is a list of nodes ``(operator, inputs, outputs, attributes)``, in the notation of
``ortmodule/_custom_gradient_registry.py`` of 1.19.2: ``GO(i)`` is the gradient of the i-th output, ``I(i)`` and
``O(i)`` are the inputs and outputs of the operator, ``GI(i)`` is the gradient of the i-th input. ORTModule hands
the whole table to its gradient builder each time a model is wrapped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_ATEN: Final = ("ATen", "org.pytorch.aten")

_Node = tuple[Any, ...]


class _Gradient(NamedTuple):
    """The gradient of one ATen operator; `constants` are the inputs that have none."""

    operator: str
    nodes: list[_Node]
    constants: tuple[int, ...]


def _backward(operator: str, inputs: list[str], outputs: list[str]) -> _Node:
    return (_ATEN, inputs, outputs, {"operator": {"value": operator, "dtype": "string"}})


def _constant(name: str, value: object, dtype: str) -> _Node:
    return ("Constant", [], [name], {"value": {"value": value, "dtype": dtype, "is_tensor": True}})


def _all(kind: str, number: int) -> list[str]:
    """Return the names of the first gradients, inputs or results."""
    return [f"{kind}({i})" for i in range(number)]


_ALL_THREE: Final = _constant("output_mask", [True, True, True], "bool")

_GRADIENTS: Final = (
    # Takes grad, self, beta, threshold.
    _Gradient(
        "softplus",
        [_backward("softplus_backward", ["GO(0)", "I(0)", "I(1)", "I(2)"], ["GI(0)"])],
        constants=(1, 2),
    ),
    # Takes grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask.
    _Gradient(
        "convolution",
        [
            ("Shape", ["I(2)"], ["bias_sizes"]),
            _ALL_THREE,
            _backward(
                "convolution_backward",
                ["GO(0)", "I(0)", "I(1)", "bias_sizes", *(f"I({i})" for i in range(3, 9)), "output_mask"],
                ["GI(0)", "GI(1)", "GI(2)"],
            ),
        ],
        constants=(3, 4, 5, 6, 7, 8),
    ),
    # Takes grad, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, mask.
    _Gradient(
        "native_batch_norm",
        [
            _ALL_THREE,
            _backward(
                "native_batch_norm_backward",
                ["GO(0)", "I(0)", "I(1)", "I(3)", "I(4)", "O(1)", "O(2)", "I(5)", "I(7)", "output_mask"],
                ["GI(0)", "GI(1)", "GI(2)"],
            ),
        ],
        constants=(3, 4, 5, 6, 7),
    ),
    # Takes grad, self, kernel_size, stride, padding, dilation, ceil_mode, indices.
    _Gradient(
        "max_pool3d_with_indices",
        [
            _backward(
                "max_pool3d_with_indices_backward",
                ["GO(0)", *(f"I({i})" for i in range(6)), "O(1)"],
                ["GI(0)"],
            )
        ],
        constants=(1, 2, 3, 4, 5),
    ),
    # Takes grad, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override.
    _Gradient(
        "avg_pool3d",
        [_backward("avg_pool3d_backward", ["GO(0)", *(f"I({i})" for i in range(7))], ["GI(0)"])],
        constants=(1, 2, 3, 4, 5, 6),
    ),
    # Takes grad, self.
    _Gradient(
        "_adaptive_avg_pool3d",
        [_backward("_adaptive_avg_pool3d_backward", ["GO(0)", "I(0)"], ["GI(0)"])],
        constants=(1,),
    ),
    # What is added to keeps its gradient; the summands gather theirs from where they went.
    _Gradient(
        "scatter_add",
        [
            ("Identity", ["GO(0)"], ["GI(0)"]),
            _constant("sparse_grad", value=False, dtype="bool"),
            _backward("gather", ["GO(0)", "I(1)", "I(2)", "sparse_grad"], ["GI(3)"]),
        ],
        constants=(1, 2),
    ),
    _Gradient(
        "index_add",
        [
            ("Identity", ["GO(0)"], ["GI(0)"]),
            _backward("index_select", ["GO(0)", "I(1)", "I(2)"], ["GI(3)"]),
        ],
        constants=(1, 2, 4),
    ),
    # Takes grad, log_probabilities, target, weight, reduction, ignore_index, total.
    _Gradient(
        "ortlab::cross_entropy",
        [
            _backward(
                "ortlab::cross_entropy_backward",
                ["GO(0)", "O(1)", "I(1)", "I(2)", "I(3)", "I(4)", "O(2)"],
                ["GI(0)"],
            )
        ],
        constants=(1, 2, 3, 4),
    ),
    # The layers of `ortlab.engine.operators.recurrent`: gradients of the results, inputs, results.
    _Gradient(
        "ortlab::lstm_layer",
        [
            _backward(
                "ortlab::lstm_layer_backward",
                [*_all("GO", 3), *_all("I", 8), *_all("O", 4)],
                _all("GI", 7),
            )
        ],
        constants=(7,),
    ),
    _Gradient(
        "ortlab::gru_layer",
        [
            _backward(
                "ortlab::gru_layer_backward",
                [*_all("GO", 2), *(f"I({i})" for i in (0, 1, 2, 5, 6)), "O(0)", "O(2)"],
                _all("GI", 6),
            )
        ],
        constants=(6,),
    ),
    _Gradient(
        "ortlab::rnn_layer",
        [
            _backward(
                "ortlab::rnn_layer_backward",
                [*_all("GO", 2), *(f"I({i})" for i in (0, 1, 2, 5, 6, 7)), "O(0)"],
                _all("GI", 6),
            )
        ],
        constants=(6, 7),
    ),
    # Takes grad, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale.
    _Gradient(
        "_scaled_dot_product_flash_attention_for_cpu",
        [
            _backward(
                "_scaled_dot_product_flash_attention_for_cpu_backward",
                ["GO(0)", "I(0)", "I(1)", "I(2)", "O(0)", "O(1)", "I(3)", "I(4)", "I(5)", "I(6)"],
                ["GI(0)", "GI(1)", "GI(2)"],
            )
        ],
        constants=(3, 4, 5, 6),
    ),
    # Takes grad, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, mask, is_causal, scale.
    _Gradient(
        "_scaled_dot_product_efficient_attention",
        [
            _constant("grad_input_mask", [True, True, True, False], "bool"),
            _backward(
                "_scaled_dot_product_efficient_attention_backward",
                [
                    *("GO(0)", "I(0)", "I(1)", "I(2)", "I(3)"),
                    *("O(0)", "O(1)", "O(2)", "O(3)", "I(5)", "grad_input_mask", "I(6)", "I(7)"),
                ],
                ["GI(0)", "GI(1)", "GI(2)", ""],
            ),
        ],
        constants=(3, 4, 5, 6, 7),
    ),
)


def install() -> None:
    """Put the gradients of this module into ORTModule's table. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    for gradient in _GRADIENTS:
        # The key of an ATen operator is its name and its overload; these have only the default one.
        attributes = (gradient.operator, "")
        CustomGradientRegistry.register(_ATEN[1], _ATEN[0], attributes, lambda nodes=gradient.nodes: nodes)
        CustomGradientRegistry.register_custom_stop_gradient_edges(
            gradient.constants, _ATEN[1], _ATEN[0], *attributes
        )
