"""A training manager whose backward PyTorch computes in part, sums in half precision too, and the memory that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from onnx import TensorProto

from ortlab.engine.operators.exact_choice import choose_exact
from ortlab.engine.operators.kernel_choice import choose_kernels
from ortlab.engine.operators.torch_kernels import OutputBuffers
from ortlab.engine.passes.graph_edits import GraphFacts, call_kernel, declare_aten
from ortlab.engine.passes.training_graph import hand_over

if TYPE_CHECKING:
    import onnx

    from ortlab.options.options import Options

_SHORT: Final = frozenset({TensorProto.BFLOAT16, TensorProto.FLOAT16})


class TorchBackward:
    """Mixed into ORTModule's training manager: the choice of kernels after the gradient graph is built."""

    options: Options
    _execution_agent: Any
    _graph_info: Any

    def _build_graph(self, config: Any) -> None:
        super()._build_graph(config)  # type: ignore[misc]
        models = self._onnx_models  # type: ignore[attr-defined]
        if self._device.type == "cpu":  # type: ignore[attr-defined]
            leave_short_sums(models.optimized_model)
            if self.options.aten_backward:
                free_outputs = choose_kernels(models.optimized_model)
                choose_exact(models.optimized_model)
                self._graph_info = _GraphInfo(self._graph_info, free_outputs)
        hand_over(models.optimized_model)
        saved = self._debug_options.save_onnx_models  # type: ignore[attr-defined]
        if saved.save:  # ORTModule has saved the graph as it was
            models.save_optimized_model(saved.path, saved.name_prefix, self._export_mode)  # type: ignore[attr-defined]

    def _create_execution_agent(self) -> None:
        super()._create_execution_agent()  # type: ignore[misc]
        if self.options.cpu_memory_arena and self._device.type == "cpu":  # type: ignore[attr-defined]
            self._execution_agent = _BufferedAgent(self._execution_agent)


class _GraphInfo:
    """ORT's facts about a gradient graph, without the outputs whose missing gradient need not be zeros.

    ``_ORTModuleFunction.backward`` makes a tensor of zeros for each output that no gradient comes for, if the graph
    has to see its shape; for the logits of a language model these are more bytes than for everything else together.
    """

    def __init__(self, info: Any, free_outputs: list[int]) -> None:
        self._info = info
        indices = info.output_grad_indices_require_full_shape
        self.output_grad_indices_require_full_shape = [
            index for index in indices if index not in free_outputs
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


class _BufferedAgent:
    """A training agent in whose runs PyTorch's kernels keep the memory of their outputs."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._buffers = OutputBuffers()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_forward(self, feeds: Any, fetches: Any, state: Any, cache: Any = None) -> None:
        """Run the forward graph, as `TrainingAgent.run_forward`."""
        with self._buffers.in_use():
            self._agent.run_forward(feeds, fetches, state, cache)

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:
        """Run the backward graph, as `TrainingAgent.run_backward`."""
        with self._buffers.in_use():
            self._agent.run_backward(feeds, fetches, state)


def leave_short_sums(model: onnx.ModelProto) -> None:
    """Let PyTorch compute the sums of float16 and bfloat16 in a typed gradient graph, which is changed in place."""
    facts = GraphFacts(model)
    for node in model.graph.node:
        if node.op_type != "Sum" or node.domain or facts.element_types.get(node.output[0]) not in _SHORT:
            continue
        call_kernel(node, "sum_of")
        declare_aten(model)
