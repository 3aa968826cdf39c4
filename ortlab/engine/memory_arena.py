"""ONNX Runtime's arena of CPU memory: each session gets what its own options say (`enable_cpu_mem_arena`).

1.19.2's training module keeps one CPU execution provider for the whole process
(``orttraining_python_module.cc``, ``GetProviderInstanceHash``: its key is 0 whatever the options), and whether there
is an arena is the provider's. So the first session of the process decided it for all later ones, and switching the
arena off had an effect in a fresh process only. A provider that was made for the other setting is dropped here before
a session is made; the sessions that have it keep it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable

_arena: bool | None = None
"""Whether the provider that the process keeps has an arena; None while nobody knows."""


def install() -> None:
    """Install the repair; a second call changes nothing."""
    from onnxruntime import InferenceSession

    replace(InferenceSession, "_create_inference_session", _with_its_own_arena)


def _with_its_own_arena(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_inference_session(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = self._sess_options
        _drop_provider_of_other_kind(arena=options is None or bool(options.enable_cpu_mem_arena))
        return original(self, *args, **kwargs)

    return create_inference_session


def _drop_provider_of_other_kind(*, arena: bool) -> None:
    global _arena  # noqa: PLW0603 - the provider is the process's
    if arena != _arena:
        from onnxruntime.capi import _pybind_state

        _pybind_state.clear_training_ep_instances()
        _arena = arena
