"""The logging switches."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.options.log_levels import LOG_LEVELS
from ortlab.options.switches import Effect, switch


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is printed, and which files are written."""

    log_level: str = switch(
        default="WARNING",
        effect=Effect.SESSION,
        env="ORTMODULE_LOG_LEVEL",
        choices=tuple(level.name for level in reversed(LOG_LEVELS)),
        help=(
            "How much is said, and kept in `lab.messages`. INFO adds what ORTModule does and the traced graph, DEVINFO "
            "what ORT's optimisers do, on every rank, VERBOSE all there is, in every step. An export says its part "
            "when the model is next exported."
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
    # 1.19.2 would put printing operators into the graph for the first (row T14) and be silent on the CPU about the
    # second (row T15): ortlab.runs.recording counts and reads them itself, and gives neither to 1.19.2.
    print_input_density: bool = switch(
        default=False,
        effect=Effect.STEP,
        env="ORTMODULE_PRINT_INPUT_DENSITY",
        help=(
            "Counts, in each step of a run, which part of the tokens is not padding and which part of the labels is "
            "not ignored; the run shows it as a table. Tells whether shorter padding would save time. Costs one "
            "extra forward at the start of the run."
        ),
    )
    print_memory_stats: bool = switch(
        default=False,
        effect=Effect.STEP,
        env="ORTMODULE_PRINT_MEMORY_STATS",
        help=(
            "Reads memory before and after forward and backward, in the first ten steps of a run and then at powers "
            "of two; the run shows it as a table. On a GPU that of PyTorch's allocator, on the CPU the resident set "
            "of the process (Linux only)."
        ),
    )
