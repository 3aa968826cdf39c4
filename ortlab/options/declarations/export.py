"""The export switches."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.options.switches import Effect, switch


@dataclass(frozen=True, kw_only=True)
class Export:
    """How the model becomes a graph, and what happens if it cannot."""

    # Below 12 torch exports Dropout and BatchNorm wrongly in training mode; after 20 its TorchScript exporter ends.
    opset: int = switch(
        default=17,
        effect=Effect.EXPORT,
        env="ORTMODULE_ONNX_OPSET_VERSION",
        choices=tuple(range(12, 21)),
        help=(
            "Version of the ONNX operators that the model is exported to. Pin it to keep a graph that you "
            "know; an older version can be slower, because newer operators are written in pieces."
        ),
    )
    custom_autograd: bool = switch(
        default=True,
        # Read at import; _custom_autograd_function.enable_custom_autograd_support() changes it live.
        effect=Effect.EXPORT,
        env="ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        help=(
            "Runs your `torch.autograd.Function` classes as Python code inside the graph. Off traces through "
            "them, so that ORT can optimise their insides but uses its own gradient for them."
        ),
    )
    allow_autograd_checkpoint: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        env="ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT",
        help=(
            "Leaves `torch.utils.checkpoint` regions to PyTorch instead of refusing them. The model runs, "
            "but those regions gain nothing from ORT; `memory_level=1` is the ORT way to save that memory."
        ),
    )
    deepcopy_before_export: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        env="ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT",
        help=(
            "Before the export, runs a copy of the model once to learn what it returns. Off runs the model itself, "
            "which saves one copy of the weights for that moment."
        ),
    )
    export_cache_dir: str = switch(
        default="",
        effect=Effect.STEP,  # nothing is redone; the next export looks there
        env="ORTMODULE_CACHE_DIR",
        help=(
            "Folder that keeps exported graphs for the next process, which then skips tracing the model. An export "
            "is used only if code, attributes, inputs, mode, options and versions are the same; one whose trace may "
            "depend on more is not kept, and `lab.messages` says on what. ORTModule's own cache checks the "
            "model's printed form alone, so ortlab keeps files of its own there."
        ),
    )
    symbolic_shape_inference: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        help=(
            "Tells ORT the shapes in the exported graph in terms of batch and sequence length. Off, ORT knows "
            "fewer shapes: it optimises less and predicts fewer memory savings. ortlab works them out either way, for "
            "its repairs of the graph."
        ),
    )
    static_shape: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        help=(
            "Builds the graph for the shape of one batch, so that ORT works out shapes once instead of in each step. "
            "Every other shape is then exported and built anew: for batches that all have one shape. The sparsity "
            "optimizers rest meanwhile, since they keep another number of rows in each batch."
        ),
    )
    skip_check: tuple[str, ...] = switch(
        default=("DEVICE", "BUILD_GRADIENT", "EXECUTION_AGENT"),
        effect=Effect.STEP,
        env="ORTMODULE_SKIPCHECK_POLICY",
        choices=("DEVICE", "BUILD_GRADIENT", "EXECUTION_AGENT"),
        help=(
            "Which checks every step after the first leaves out: has the device changed, has the model or "
            "its input changed, must the session be made anew. Saves a little time per step; empty checks "
            "all."
        ),
    )
    fallback: bool = switch(
        default=False,
        effect=Effect.STEP,
        env="ORTMODULE_FALLBACK_POLICY",
        ort_default=True,
        help=(
            "Lets PyTorch compute the model if ORT cannot. ORTModule has it on and says little; ortlab has "
            "it off, so that you hear of the failure, and marks each run that fell back."
        ),
    )
    fallback_policy: tuple[str, ...] = switch(
        default=(
            "UNSUPPORTED_DEVICE",
            "UNSUPPORTED_DATA",
            "UNSUPPORTED_TORCH_MODEL",
            "UNSUPPORTED_ONNX_MODEL",
        ),
        effect=Effect.STEP,
        env="ORTMODULE_FALLBACK_POLICY",
        part_of="fallback",
        choices=(
            "FORCE_TORCH_FORWARD",
            "FORCE_TORCH_BACKWARD",
            "UNSUPPORTED_DEVICE",
            "UNSUPPORTED_DATA",
            "UNSUPPORTED_TORCH_MODEL",
            "UNSUPPORTED_ONNX_MODEL",
            "BAD_INITIALIZATION",
        ),
        help=(
            "Which failures fall back. The default four are what ORT does not support: a device, an input, a "
            "PyTorch model, an ONNX model."
        ),
    )
    fallback_retry: bool = switch(
        default=False,
        effect=Effect.STEP,
        env="ORTMODULE_FALLBACK_RETRY",
        part_of="fallback",
        help=(
            "Tries ORT again in each step after a fallback. Off, PyTorch computes all the steps that follow."
        ),
    )
