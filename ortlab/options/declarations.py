"""Every switch of ORTModule, declared once, in five groups that together are the fields of `ortlab.Options`."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.options.log_levels import LOG_LEVELS
from ortlab.options.switches import OPERATOR, PLAN, RECOMPUTE, Effect, Need, switch


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


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is kept for the backward pass, and where memory comes from."""

    # A model that calls torch.utils.checkpoint is also traced differently at level 1 (ortmodule/__init__.py
    # _override_gradient_checkpoint); for every other model the level acts when the session is made.
    memory_level: int = switch(
        default=0,
        effect=Effect.SESSION,
        env="ORTMODULE_MEMORY_OPT_LEVEL",
        choices=(0, 1, 2),
        help=(
            "What is recomputed in the backward pass instead of kept: 0 only `memory_plan`, 1 all that "
            "can be computed again in each transformer layer (like gradient checkpointing), 2 also what saves only "
            "part of its size. Less memory, more time, same numbers."
        ),
    )
    memory_plan: tuple[str, ...] = switch(
        default=(),
        effect=Effect.SESSION,
        env="ORTMODULE_MEMORY_OPT_CONFIG",
        older_env=("ORTMODULE_ENABLE_MEMORY_ALLEVIATION",),
        syntax=PLAN,
        help=(
            "Which activations are recomputed instead of kept, as <cluster>:<strategy>:<count>: strategy 1 "
            "recompute, 2 recompute with compromise, 0 off; count k for the first k places, -1 for all. "
            "`lab.plan()` lists the plans of a model."
        ),
    )
    recompute: tuple[str, ...] = switch(
        default=(),
        effect=Effect.SESSION,
        syntax=RECOMPUTE,
        help=(
            "What the backward recomputes: `layers` keeps what each layer hands on, `layers[:4]` of the first four, "
            "`layers:2` of every second, `layers:1/2` also of the first half of each; `all but matmuls` keeps what "
            "products return, `all but linear` linear layers; or modules, as `encoder.layer.*.attention`. Less memory, "
            "more time, the same numbers bit for bit; acts beside levels and plans."
        ),
    )
    cpu_memory_arena: bool = switch(
        default=True,
        effect=Effect.SESSION,
        help=(
            "Lets ORT, and PyTorch's kernels inside its graphs, keep freed CPU memory for reuse. Off gives it back "
            "to the system, which makes memory figures honest and steps slower."
        ),
    )
    chunked_loss: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        help=(
            "In training, computes the last product and the cross entropy in blocks of rows, forward and backward "
            "together, so that no full logits exist. Less memory with large vocabularies, same numbers to rounding; "
            "the logits that the model returns cannot be read meanwhile. `lab.messages` says where, or why not."
        ),
    )
    external_gpu_allocator: bool = switch(
        default=True,
        effect=Effect.WRAP,
        needs=(Need.CUDA,),
        help=(
            "ORT takes GPU memory from PyTorch's pool. Off, each keeps a pool of its own, and neither can reuse "
            "what the other has freed."
        ),
    )
    mem_efficient_grad_management: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        env="ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT",
        help=(
            "Hands each gradient to PyTorch as soon as it is there, instead of all at the end of the backward pass. "
            "Saves one copy of all gradients where several batches are accumulated into them, and nothing where "
            "each step begins without gradients; needs `custom_autograd`."
        ),
    )
    memory_efficient_gradient: bool = switch(
        default=False,
        effect=Effect.GRAPH,
        help=(
            "Builds gradients from forward outputs instead of inputs where both would do, so that fewer are "
            "kept. Less memory for some activation functions."
        ),
    )


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
            "model's printed form alone, so ortlab keeps files of its own. One that others can write is refused."
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


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is printed, and which files are written."""

    log_level: str = switch(
        default="WARNING",
        effect=Effect.SESSION,
        env="ORTMODULE_LOG_LEVEL",
        choices=tuple(level.name for level in reversed(LOG_LEVELS)),
        help=(
            "How much ortlab collects in `lab.messages`. INFO adds what ORTModule does and the traced graph, DEVINFO "
            "what ORT's optimizers do, on every rank, VERBOSE all there is, in every step. An export says its part "
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


@dataclass(frozen=True, kw_only=True)
class Experimental:
    """What ORT itself calls experimental, or has for a few GPUs only."""

    efficient_attention: bool = switch(
        default=False,
        effect=Effect.GRAPH,
        env="ORTMODULE_USE_EFFICIENT_ATTENTION",
        needs=(Need.CUDA,),
        help=(
            "Replaces attention that is written out - matmul, divide, add the mask, softmax, matmul - by PyTorch's "
            "memory-efficient attention. Saves time and memory with long sequences; numbers change by rounding only. "
            "For `scaled_dot_product_attention` take `sdpa_fallback`."
        ),
    )
    sdpa_fallback: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        env="ORTMODULE_ATEN_SDPA_FALLBACK",
        help=(
            "Exports `scaled_dot_product_attention` as one call to PyTorch's fused attention instead of in pieces. "
            "Saves time and memory with long sequences. On the CPU only where attention has no dropout; a message "
            "names what stays in pieces."
        ),
    )
    flash_attention: bool = switch(
        default=False,
        effect=Effect.GRAPH,
        env="ORTMODULE_USE_FLASH_ATTENTION",
        needs=(Need.CUDA, Need.AMPERE, Need.TRITON, Need.TRITON_BUILD),
        part_of="triton",
        help=(
            "Replaces attention that is written out by a Triton flash attention. Saves time and memory "
            "with long sequences; works in half precision."
        ),
    )
    triton: bool = switch(
        default=False,
        effect=Effect.WRAP,
        env="ORTMODULE_USE_TRITON",
        needs=(Need.CUDA, Need.TRITON, Need.TRITON_BUILD),
        help=(
            "Fuses chains of elementwise and reduction operators into Triton kernels, compiled at the first "
            "step. Slower start, faster steps. Once it was on in a kernel, `tuning` tries Triton's matrix products, "
            "with `triton` off as well."
        ),
    )
    triton_config_file: str = switch(
        default="",
        effect=Effect.SESSION,
        env="ORTMODULE_TRITON_CONFIG_FILE",
        part_of="triton",
        help=(
            "JSON file that says which operators Triton may fuse, and from how many on; empty for ORT's own "
            "list."
        ),
    )
    triton_debug: bool = switch(
        default=False,
        effect=Effect.SESSION,
        env="ORTMODULE_TRITON_DEBUG",
        part_of="triton",
        help="Writes the fused graphs and their Triton source into the folder `triton_debug`.",
    )
    tuning: bool = switch(
        default=False,
        effect=Effect.SESSION,
        env="ORTMODULE_ENABLE_TUNING",
        needs=(Need.CUDA,),
        help=(
            "Times the variants of tunable GPU kernels in the first steps and keeps the fastest. Slower "
            "start, faster steps."
        ),
    )
    tuning_max_duration_ms: int = switch(
        default=0,
        effect=Effect.SESSION,
        env="ORTMODULE_MAX_TUNING_DURATION_MS",
        minimum=0,
        part_of="tuning",
        help="Longest time for tuning one kernel, in milliseconds; 0 for no limit.",
    )
    # Not part_of tuning: 1.19.2 writes the file while tuning is on and reads it while tuning is off.
    tuning_results_path: str = switch(
        default="",
        effect=Effect.SESSION,
        env="ORTMODULE_TUNING_RESULTS_PATH",
        needs=(Need.CUDA,),
        help="Folder of tuning results: written while `tuning` is on, used while it is off; empty for none.",
    )
    zero_stage3: bool = switch(
        default=False,
        effect=Effect.WRAP,
        env="ORTMODULE_ENABLE_ZERO_STAGE3",
        needs=(Need.CUDA, Need.DEEPSPEED),
        help=(
            "Works with DeepSpeed ZeRO stage 3, which spreads the weights over the GPUs. Switched off again, it is "
            "off for this model, but DeepSpeed keeps ORT's hooks in place of its own until the kernel restarts."
        ),
    )
    grad_accumulation_cache: bool = switch(
        default=False,
        effect=Effect.GRAPH,
        help=(
            "While gradients are accumulated, keeps casted weights between the micro-batches. Unfinished in "
            "1.19.2: more memory for less time with mixed precision."
        ),
    )
