"""The compute switches."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.options.switches import OPERATOR, Effect, Need, switch


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What is computed, and with which kernels."""

    compute_optimizer: bool = switch(
        default=True,
        effect=Effect.GRAPH,
        env="ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",
        help=(
            "Moves slicing and gathering ahead of costly operators, so that less is computed. Saves time and "
            "memory; off gives exactly PyTorch's computation, for finding differences."
        ),
    )
    # Both sparsity switches put a marker operator into the graph while it is traced
    # (_graph_transition_manager._add_check_*_sparsity_hook), so a change needs a new export.
    label_sparse_optimizer: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        env="ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
        older_env=("ORTMODULE_ENABLE_SPARSE_OPTIMIZER",),
        part_of="compute_optimizer",
        help=(
            "Leaves out the loss rows whose label is ignored (-100), if fewer than 90 % of the first batch's "
            "labels count. Saves time and memory; acts on `torch.nn.CrossEntropyLoss` sub-modules."
        ),
    )
    embedding_sparse_optimizer: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        env="ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER",
        older_env=("ORTMODULE_ENABLE_SPARSE_OPTIMIZER",),
        needs=(Need.CUDA,),
        part_of="compute_optimizer",
        help=(
            "Computes nothing for padding tokens, if more than 10 % of the first batch is padding. Saves "
            "time and memory; acts on `torch.nn.Embedding` with a `padding_idx`, on CUDA only."
        ),
    )
    aten_cross_entropy: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        help=(
            "Computes the cross entropy of 256 classes and more with PyTorch's kernels on the CPU, where ORT's "
            "take one number at a time. Saves time with large vocabularies; numbers change by rounding only. Where "
            "`label_sparse_optimizer` leaves rows out, ORT's operator stays."
        ),
    )
    aten_recurrent: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        help=(
            "On the CPU, PyTorch computes LSTM, GRU and RNN layers, forward and backward. Saves nine tenths of a "
            "step of a recurrent model, since ORT's gradients take 10 to 24 times as long; numbers change by rounding "
            "only."
        ),
    )
    aten_backward: bool = switch(
        default=True,
        effect=Effect.GRAPH,
        help=(
            "On the CPU, PyTorch's kernels compute the gradients of large linear layers, LayerNorm, Gelu, Relu, "
            "softmax, indexing and masks, and sums, means, convolutions, tanh and sigmoid, where ORT is slower, less "
            "exact or rounds otherwise. "
            "Saves a fifth of a step with a large vocabulary. Memory plans stay the same; memory rises by up to a "
            "tenth, less if `cpu_memory_arena` is off."
        ),
    )
    intra_op_spinning: bool = switch(
        default=False,
        effect=Effect.SESSION,
        ort_default=True,
        help=(
            "Lets ORT's idle CPU threads spin instead of sleep. ONNX Runtime has it on; ortlab has it off, "
            "because the spinning threads take the cores from PyTorch's own threads between forward and "
            "backward."
        ),
    )
    conv_algo_search: str = switch(
        default="HEURISTIC",
        effect=Effect.SESSION,
        env="ORTMODULE_CONV_ALGO_SEARCH",
        needs=(Need.CUDA,),
        choices=("HEURISTIC", "EXHAUSTIVE"),
        help=(
            "How cuDNN picks a convolution algorithm. EXHAUSTIVE times them all: a slower first step, "
            "sometimes faster steps after it."
        ),
    )
    cast_level: int = switch(
        default=1,
        effect=Effect.GRAPH,
        choices=(-1, 0, 1, 2),  # propagate_cast_ops.cc knows no other, and takes any number
        help=(
            "How far casts to and from half precision are moved to widen the half-precision regions: -1 not "
            "at all, 0 past the operators in `cast_allow`, 1 also past those that do not calculate, 2 also "
            "past some that do. Only mixed-precision models change, in time and in rounding."
        ),
    )
    cast_strategy: str = switch(
        default="FLOOD_FILL",
        effect=Effect.GRAPH,
        choices=("NONE", "INSERT_AND_REDUCE", "FLOOD_FILL"),
        help=(
            "How casts are moved: FLOOD_FILL grows the half-precision regions, NONE leaves them. "
            "INSERT_AND_REDUCE adds casts and cancels pairs, which makes parts of a float32 model compute in half "
            "precision too: losses change in the sixth digit and more."
        ),
    )
    cast_allow: tuple[str, ...] = switch(
        default=(),
        effect=Effect.GRAPH,
        syntax=OPERATOR,
        help="More operator types that casts may be moved past (`cast_level` 0 and above).",
    )
