"""The logging switches."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.switches import Effect, Need, switch


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is printed, and which files are written."""

    log_level: str = switch(
        default="WARNING",
        effect=Effect.SESSION,
        env="ORTMODULE_LOG_LEVEL",
        choices=("VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"),
        help=(
            "How much ORT tells. INFO adds the memory plans and the traced graph, DEVINFO ORT's own messages "
            "on every rank, VERBOSE all there is. More text slows the build, hardly the steps."
        ),
    )
    save_onnx: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        help=(
            "Writes the five ONNX graphs of each build to files: exported, post-processed, optimised before "
            "the gradient, with gradient, and as executed."
        ),
    )
    save_onnx_prefix: str = switch(
        default="",
        effect=Effect.EXPORT,
        part_of="save_onnx",
        help="Start of the file names of saved graphs; empty for the name of the model's class.",
    )
    save_onnx_path: str = switch(
        default="",
        effect=Effect.EXPORT,
        env="ORTMODULE_SAVE_ONNX_PATH",
        part_of="save_onnx",
        help="Folder for saved graphs; empty for the current one.",
    )
    print_input_density: bool = switch(
        default=False,
        effect=Effect.GRAPH,
        env="ORTMODULE_PRINT_INPUT_DENSITY",
        help=(
            "Prints in each step which part of the labels and tokens is not padding, where a sparsity switch "
            "found some. Tells whether shorter padding would save time."
        ),
    )
    print_memory_stats: bool = switch(
        default=False,
        effect=Effect.STEP,
        env="ORTMODULE_PRINT_MEMORY_STATS",
        needs=(Need.CUDA,),
        help=(
            "Prints GPU memory before and after forward and backward, in steps 0 to 9 and then at powers of "
            "two; needs `log_level` INFO or lower."
        ),
    )
