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
        when="a difference from PyTorch has to be traced to it, or away from it",
        unless="you look for speed: on is the fast side, wherever a model slices or gathers",
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
        when="each batch must be computed alike, whatever part of its labels counts",
        unless="most labels count: it does nothing then",
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
        when="a difference on a GPU has to be traced to it",
        unless="batches have little padding: it does nothing then",
    )
    aten_cross_entropy: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        help=(
            "Computes the cross entropy of 256 classes, or 32,768 scores, and more with PyTorch's kernels on the CPU, "
            "where ORT's take one number at a time. Saves time with large vocabularies; numbers change by rounding "
            "only. Where `label_sparse_optimizer` leaves rows out, ORT's operator stays."
        ),
        when="you want ONNX Runtime's own cross entropy, to compare with another build of it",
        unless="you train: off is slower with every large vocabulary",
    )
    aten_recurrent: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        help=(
            "On the CPU, PyTorch computes LSTM, GRU and RNN layers, forward and backward. Saves nine tenths of a "
            "step of a recurrent model, since ORT's gradients take 10 to 24 times as long; numbers change by rounding "
            "only."
        ),
        when="you want to see ONNX Runtime's own recurrent operators in the graph",
        unless="you train an LSTM, GRU or RNN: off takes many times as long",
    )
    aten_backward: bool = switch(
        default=True,
        effect=Effect.GRAPH,
        help=(
            "On the CPU, PyTorch's kernels compute attention over 1,024 positions and more, the gradients of large "
            "linear layers, norms, activations, softmax and indexing, and layer norms, sums, means and convolutions, "
            "where ORT is slower or less exact. Saves a fifth of a step with a large vocabulary. Plans stay the same "
            "but in such attention; memory rises by up to a tenth, less if `cpu_memory_arena` is off."
        ),
        when="you want ONNX Runtime's own gradients, or the last tenth of memory",
        unless="time matters: off is slower for most models on a CPU",
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
        when="ONNX Runtime has cores that PyTorch's threads leave alone",
        unless="other work runs on the machine: a step can then take several times as long",
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
        when="a convolutional network trains for hours with inputs of one shape",
        unless="shapes change: each new one is searched again",
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
        when="a model under autocast has casts that you want moved further, or not at all",
        unless="the model is float32 throughout: no cast is there to move",
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
        when="the graph of a model under autocast computes in half precision what you want in float32",
        unless="the numbers are right: INSERT_AND_REDUCE changes even a float32 model",
    )
    cast_allow: tuple[str, ...] = switch(
        default=(),
        effect=Effect.GRAPH,
        syntax=OPERATOR,
        help="More operator types that casts may be moved past (`cast_level` 0 and above).",
        when="`%ort_graph` shows a cast in front of an operator that half precision does no harm",
        unless="the model is float32 throughout: no cast is there to move",
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
        when="you want less memory with one word, and the model has layers that repeat",
        unless="a few plans are enough: those that `%ort_budget 70%` chooses cost less time",
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
        when=(
            "you know from `lab.plan()` which activations to give up; `%ort_budget` chooses and sets them "
            "for you"
        ),
        unless="the peak is not made of activations: parameters and logits are not recomputed",
    )
    recompute: tuple[str, ...] = switch(
        default=(),
        effect=Effect.SESSION,
        syntax=RECOMPUTE,
        help=(
            "What the backward recomputes: `layers` keeps what each layer hands on, `layers[:4]` of the first four, "
            "`layers:2` of every second, `layers:1/2` also of each first half, `layers:1/2 nested` makes that again; "
            "`all but matmuls` keeps what products return, `all but linear` linear layers; or modules, as "
            "`encoder.layer.*.attention`. Less memory, more time, the same bits; beside levels and plans."
        ),
        when="memory decides and the model is deep: of each layer, `layers` keeps one result",
        unless="`%ort_budget` meets your limit with plans: they cost less time",
    )
    cpu_memory_arena: bool = switch(
        default=True,
        effect=Effect.SESSION,
        help=(
            "Lets ORT, and PyTorch's kernels inside its graphs, keep freed CPU memory for reuse. Off gives it back "
            "to the system, which makes memory figures honest and steps slower."
        ),
        when="you compare memory with another program, or other processes need what a step frees",
        unless="time matters: each step then asks the system for its memory",
    )
    chunked_loss: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        help=(
            "In training, computes the last product and the cross entropy in blocks of rows, forward and backward "
            "together, so that no full logits exist. Less memory with large vocabularies, same numbers to rounding; "
            "the logits that the model returns cannot be read meanwhile. `lab.messages` says where, or why not."
        ),
        when="the vocabulary is large, so that logits are most of the peak",
        unless="the step reads the logits, for a metric or a second loss",
    )
    external_gpu_allocator: bool = switch(
        default=True,
        effect=Effect.WRAP,
        needs=(Need.CUDA,),
        help=(
            "ORT takes GPU memory from PyTorch's pool. Off, each keeps a pool of its own, and neither can reuse "
            "what the other has freed."
        ),
        when="ONNX Runtime's allocations have to be told from PyTorch's in a memory profile",
        unless="memory is short: two pools cannot use each other's gaps",
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
        when="you accumulate gradients over several batches",
        unless="`zero_grad()` precedes each backward: it saves nothing then, and takes time",
    )
    memory_efficient_gradient: bool = switch(
        default=False,
        effect=Effect.GRAPH,
        help=(
            "Builds gradients from forward outputs instead of inputs where both would do, so that fewer are "
            "kept. Less memory for some activation functions."
        ),
        when="activation functions are most of what is kept (`%ort_activations` tells)",
        unless="the model has none that can do without its input: nothing changes then",
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
        when="a graph must stay as it was, or a tool that reads it knows older versions only",
        unless="you look for speed: the default has the operators that ONNX Runtime handles best",
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
        when=(
            "you want ONNX Runtime to optimise what your Function computes, and its gradient is the plain one"
        ),
        unless="your Function has a gradient of its own making: off replaces it",
    )
    allow_autograd_checkpoint: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        env="ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT",
        help=(
            "Leaves `torch.utils.checkpoint` regions to PyTorch instead of refusing them. The model runs, "
            "but those regions gain nothing from ORT; `memory_level=1` is the ORT way to save that memory."
        ),
        when="a model calls `torch.utils.checkpoint` in a place that you cannot change",
        unless="you can turn the model's checkpointing off and take `recompute` or `memory_level`",
    )
    deepcopy_before_export: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        env="ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT",
        help=(
            "Before the export, runs a copy of the model once to learn what it returns. Off runs the model itself, "
            "which saves one copy of the weights for that moment."
        ),
        when="memory has no room for a second set of weights at the first step",
        unless="your forward changes the model: the copy is changed then, and the model is not",
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
        when="the same model is started again and again, and its export takes long",
        unless="you change the model's code between starts: each change is exported again",
    )
    symbolic_shape_inference: bool = switch(
        default=True,
        effect=Effect.EXPORT,
        help=(
            "Tells ORT the shapes in the exported graph in terms of batch and sequence length. Off, ORT knows "
            "fewer shapes: it optimises less and predicts fewer memory savings. ortlab works them out either way, for "
            "its repairs of the graph."
        ),
        when="shape inference itself fails or takes long",
        unless="plans or predictions matter: without shapes there are fewer of both",
    )
    static_shape: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        help=(
            "Builds the graph for the shape of one batch, so that ORT works out shapes once instead of in each step. "
            "Every other shape is then exported and built again: for batches that all have one shape. The sparsity "
            "optimizers rest meanwhile, since they keep another number of rows in each batch."
        ),
        when="all batches have one shape, and a step is short",
        unless="batches differ in shape, since each is built; or memory is short, since it can take more",
    )
    skip_check: tuple[str, ...] = switch(
        default=("DEVICE", "BUILD_GRADIENT", "EXECUTION_AGENT"),
        effect=Effect.STEP,
        env="ORTMODULE_SKIPCHECK_POLICY",
        choices=("DEVICE", "BUILD_GRADIENT", "EXECUTION_AGENT"),
        help=(
            "Which of its own checks ORTModule leaves out in a step: has the device changed, has the model or its "
            "input, must the session be made again. ortlab asks all of this in each call, whatever stands here: it is "
            "kept for scripts that set it."
        ),
        when="a script for ORTModule sets it",
        unless="you write for ortlab: it changes nothing",
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
        when="a long run must not stop, whoever computes it",
        unless="you measure: figures of PyTorch would stand among those of ONNX Runtime; ortlab marks them",
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
        when="only some failures may go to PyTorch, or PyTorch is to compute on purpose",
        unless="`fallback` is off: it does nothing then",
    )
    fallback_retry: bool = switch(
        default=False,
        effect=Effect.STEP,
        env="ORTMODULE_FALLBACK_RETRY",
        part_of="fallback",
        help=(
            "Tries ORT again in each step after a fallback. Off, PyTorch computes all the steps that follow."
        ),
        when="a failure comes from single batches, and the next may pass",
        unless="the model itself is what fails: each step would try in vain",
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
        when="you want to know what a build did, and `lab.messages` does not say it",
        unless="you train for long: VERBOSE collects in each step",
    )
    save_onnx: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        help=(
            "Writes the five ONNX graphs of each build to files: exported, post-processed, optimised before "
            "the gradient, with gradient, and as executed."
        ),
        when="another tool has to read the graphs",
        unless="you want to look at them: `%ort_graph` needs no file",
    )
    save_onnx_prefix: str = switch(
        default="",
        effect=Effect.EXPORT,
        part_of="save_onnx",
        help="Start of the file names of saved graphs; empty for the name of the model's class.",
        when="models of one class write into one folder",
        unless="`save_onnx` is off: it does nothing then",
    )
    save_onnx_path: str = switch(
        default="",
        effect=Effect.EXPORT,
        env="ORTMODULE_SAVE_ONNX_PATH",
        part_of="save_onnx",
        help="Folder for saved graphs; empty for the current one.",
        when="files are not to lie beside the notebook",
        unless="`save_onnx` is off: it does nothing then",
    )
    # 1.19.2 would put printing operators into the graph for the first and be silent on the CPU about the
    # second: ortlab.runs.recording counts and reads them itself, and gives neither to 1.19.2.
    print_input_density: bool = switch(
        default=False,
        effect=Effect.STEP,
        env="ORTMODULE_PRINT_INPUT_DENSITY",
        help=(
            "Counts, in each step of a run, which part of the tokens is not padding and which part of the labels is "
            "not ignored; the run shows it as a table. Tells whether shorter padding would save time. Costs one "
            "extra forward at the start of the run."
        ),
        when="batches are padded, or labels ignored, and you want to know how much",
        unless="batches have no padding: it says 100 % and costs a forward",
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
        when="you want to see memory grow from step to step",
        unless="you want what a step needs: `lab.memory()` and each run have that",
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
        when="the model writes its attention out, sequences are long, and a GPU computes",
        unless="it calls `scaled_dot_product_attention`: take `sdpa_fallback`",
    )
    sdpa_fallback: bool = switch(
        default=False,
        effect=Effect.EXPORT,
        env="ORTMODULE_ATEN_SDPA_FALLBACK",
        help=(
            "Exports `scaled_dot_product_attention` as one call to PyTorch's fused attention instead of in pieces. "
            "Saves time and memory with long sequences. On the CPU only where attention has no dropout, and there "
            "`aten_backward` takes 1,024 positions and more anyway; a message names what stays in pieces."
        ),
        when="sequences are long, so that attention's scores are much of the peak",
        unless="on a CPU attention drops out: it stays in pieces there",
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
        when="half precision, long sequences and an Ampere GPU come together",
        unless="attention is not written out, or computes in float32",
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
        when="a GPU spends its step in many small elementwise operators (`%ort_profile` tells)",
        unless="starts must be quick: kernels are compiled at the first step",
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
        when="a fused operator is wrong or slow, and you want it left out",
        unless="ORT's own list serves",
    )
    triton_debug: bool = switch(
        default=False,
        effect=Effect.SESSION,
        env="ORTMODULE_TRITON_DEBUG",
        part_of="triton",
        help="Writes the fused graphs and their Triton source into the folder `triton_debug`.",
        when="you want to read what Triton was given",
        unless="nothing is wrong: it writes files at each build",
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
        when="a GPU trains for hours with batches of one shape",
        unless="runs are short: tuning takes longer than it saves",
    )
    tuning_max_duration_ms: int = switch(
        default=0,
        effect=Effect.SESSION,
        env="ORTMODULE_MAX_TUNING_DURATION_MS",
        minimum=0,
        part_of="tuning",
        help="Longest time for tuning one kernel, in milliseconds; 0 for no limit.",
        when="tuning makes the first steps too long",
        unless="`tuning` is off: it does nothing then",
    )
    # Not part_of tuning: 1.19.2 writes the file while tuning is on and reads it while tuning is off.
    tuning_results_path: str = switch(
        default="",
        effect=Effect.SESSION,
        env="ORTMODULE_TUNING_RESULTS_PATH",
        needs=(Need.CUDA,),
        help="Folder of tuning results: written while `tuning` is on, used while it is off; empty for none.",
        when="several runs are to share one tuning",
        unless="kernels, driver or GPU differ between them",
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
        when="DeepSpeed's stage 3 owns the weights",
        unless="the model fits a GPU, or DeepSpeed runs another stage",
    )
    grad_accumulation_cache: bool = switch(
        default=False,
        effect=Effect.GRAPH,
        help=(
            "While gradients are accumulated, keeps casted weights between the micro-batches. Unfinished in "
            "1.19.2: more memory for less time with mixed precision."
        ),
        when="you try what 1.19.2 left unfinished, under autocast with accumulated gradients",
        unless="you train in earnest",
    )
