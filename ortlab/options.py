"""Every switch of ORTModule, declared once: validation, panel, magics, docs and doctor are generated from here."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortlab import environment
from ortlab.errors import OptionError
from ortlab.switches import REASONS, Effect, Group, Need, Switch, Value, declared, switch

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Effect", "Group", "Need", "Options", "Switch", "check_needs", "markdown", "switches", "table", "unmet"]


@dataclass(frozen=True, repr=False)
class Options:
    """Every switch of ORTModule, with a value each; a change makes a new record.

    The defaults are those of onnxruntime-training 1.19.2, except where a help text says otherwise. Values may be
    given as text ("on", "0", "info", "Gelu+:1:-1,Cast+:1:-1"): magics and environment variables do.

    Raises
    ------
    OptionError
        A value has the wrong type, or two values contradict each other.

    Examples
    --------
    >>> Options(memory_level="1").replace(log_level="info")
    Options(memory_level=1, log_level='INFO')
    """

    # --- compute -------------------------------------------------------------------------------------------------
    compute_optimizer: bool = switch(
        True,
        effect=Effect.GRAPH,
        group=Group.COMPUTE,
        env="ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",
        help="Moves slicing and gathering ahead of costly operators, so that less is computed. Saves time and memory; "
        "off gives exactly PyTorch's computation, for hunting differences.",
    )
    # Both sparsity switches put a marker operator into the graph while it is traced
    # (_graph_transition_manager._add_check_*_sparsity_hook), so a change needs a new export.
    label_sparse_optimizer: bool = switch(
        True,
        effect=Effect.EXPORT,
        group=Group.COMPUTE,
        env="ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
        older_env=("ORTMODULE_ENABLE_SPARSE_OPTIMIZER",),
        part_of="compute_optimizer",
        help="Leaves out the loss rows whose label is ignored (-100), if fewer than 90 % of the first batch's labels "
        "count. Saves time and memory; acts on `torch.nn.CrossEntropyLoss` sub-modules.",
    )
    embedding_sparse_optimizer: bool = switch(
        True,
        effect=Effect.EXPORT,
        group=Group.COMPUTE,
        env="ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER",
        older_env=("ORTMODULE_ENABLE_SPARSE_OPTIMIZER",),
        needs=(Need.CUDA,),
        part_of="compute_optimizer",
        help="Computes nothing for padding tokens, if more than 10 % of the first batch is padding. Saves time and "
        "memory; acts on `torch.nn.Embedding` with a `padding_idx`, on CUDA only.",
    )
    aten_cross_entropy: bool = switch(
        False,
        effect=Effect.EXPORT,
        group=Group.COMPUTE,
        help="Computes cross entropy and its gradient with PyTorch's kernels instead of ORT's. Saves time on the CPU "
        "with large vocabularies; numbers change by rounding only.",
    )
    intra_op_spinning: bool = switch(
        False,
        effect=Effect.SESSION,
        group=Group.COMPUTE,
        ort_default=True,
        help="Lets ORT's idle CPU threads spin instead of sleep. ONNX Runtime has it on; ortlab has it off, because "
        "the spinning threads take the cores from PyTorch's own threads between forward and backward.",
    )
    conv_algo_search: str = switch(
        "HEURISTIC",
        effect=Effect.SESSION,
        group=Group.COMPUTE,
        env="ORTMODULE_CONV_ALGO_SEARCH",
        needs=(Need.CUDA,),
        choices=("HEURISTIC", "EXHAUSTIVE"),
        help="How cuDNN picks a convolution algorithm. EXHAUSTIVE times them all: a slower first step, sometimes "
        "faster steps after it.",
    )
    cast_level: int = switch(
        1,
        effect=Effect.GRAPH,
        group=Group.COMPUTE,
        choices=(-1, 0, 1, 2),
        help="How far casts to and from half precision are moved to widen the half-precision regions: -1 not at all, "
        "0 past the operators in `cast_allow`, 1 also past those that do not calculate, 2 also past some that do. "
        "Only mixed-precision models change, in time and in rounding.",
    )
    cast_strategy: str = switch(
        "FLOOD_FILL",
        effect=Effect.GRAPH,
        group=Group.COMPUTE,
        choices=("NONE", "INSERT_AND_REDUCE", "FLOOD_FILL"),
        help="How casts are moved: FLOOD_FILL grows the half-precision regions, INSERT_AND_REDUCE adds casts and "
        "cancels pairs, NONE leaves them.",
    )
    cast_allow: tuple[str, ...] = switch(
        (),
        effect=Effect.GRAPH,
        group=Group.COMPUTE,
        help="More operator types that casts may be moved past (`cast_level` 0 and above).",
    )

    # --- memory --------------------------------------------------------------------------------------------------
    # A model that calls torch.utils.checkpoint is also traced differently at level 1 (ortmodule/__init__.py
    # _override_gradient_checkpoint); for every other model the level acts when the session is made.
    memory_level: int = switch(
        0,
        effect=Effect.SESSION,
        group=Group.MEMORY,
        env="ORTMODULE_MEMORY_OPT_LEVEL",
        choices=(0, 1, 2),
        help="What is recomputed in the backward pass instead of kept: 0 only `memory_plan`, 1 all that is cheap in "
        "each transformer layer (like gradient checkpointing), 2 also what saves only part of its size. Less memory, "
        "more time, same numbers.",
    )
    memory_plan: tuple[str, ...] = switch(
        (),
        effect=Effect.SESSION,
        group=Group.MEMORY,
        env="ORTMODULE_MEMORY_OPT_CONFIG",
        older_env=("ORTMODULE_ENABLE_MEMORY_ALLEVIATION",),
        help="Which activations are recomputed instead of kept, as <cluster>:<strategy>:<count>: strategy 1 recompute, "
        "2 recompute with compromise, 0 off; count -1 for all. `lab.plan()` lists the plans of a model.",
    )
    cpu_memory_arena: bool = switch(
        True,
        effect=Effect.SESSION,
        group=Group.MEMORY,
        help="Lets ORT keep freed CPU memory for reuse. Off gives it back to the system, which makes memory figures "
        "honest and steps slower.",
    )
    external_gpu_allocator: bool = switch(
        True,
        effect=Effect.WRAP,
        group=Group.MEMORY,
        needs=(Need.CUDA, Need.GPU_ALLOCATOR),
        help="ORT takes GPU memory from PyTorch's pool. Off, each keeps a pool of its own, and memory that one has "
        "freed is not there for the other.",
    )
    mem_efficient_grad_management: bool = switch(
        False,
        effect=Effect.EXPORT,
        group=Group.MEMORY,
        env="ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT",
        help="Hands each gradient to PyTorch as soon as it is there, instead of all at the end of the backward pass. "
        "Less memory at the peak; needs `custom_autograd`.",
    )
    memory_efficient_gradient: bool = switch(
        False,
        effect=Effect.GRAPH,
        group=Group.MEMORY,
        help="Builds gradients from forward outputs instead of inputs where both would do, so that fewer are kept. "
        "Less memory for some activation functions.",
    )
    grad_accumulation_cache: bool = switch(
        False,
        effect=Effect.GRAPH,
        group=Group.EXPERIMENTAL,
        help="While gradients are accumulated, keeps casted weights between the micro-batches. Unfinished in 1.19.2: "
        "more memory for less time with mixed precision.",
    )

    # --- export --------------------------------------------------------------------------------------------------
    opset: int = switch(
        17,
        effect=Effect.EXPORT,
        group=Group.EXPORT,
        env="ORTMODULE_ONNX_OPSET_VERSION",
        minimum=12,
        help="Version of the ONNX operators that the model is exported to. Pin it to keep a graph that you know; "
        "an older version can be slower, because newer operators are written in pieces.",
    )
    custom_autograd: bool = switch(
        True,
        # Read at import, but _custom_autograd_function.enable_custom_autograd_support() switches it at run time.
        effect=Effect.EXPORT,
        group=Group.EXPORT,
        env="ORTMODULE_ENABLE_CUSTOM_AUTOGRAD",
        help="Runs your `torch.autograd.Function` classes as Python code inside the graph. Off traces through them, "
        "so that ORT can optimise their insides but uses its own gradient for them.",
    )
    allow_autograd_checkpoint: bool = switch(
        False,
        effect=Effect.EXPORT,
        group=Group.EXPORT,
        env="ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT",
        help="Leaves `torch.utils.checkpoint` regions to PyTorch instead of refusing them. The model runs, but those "
        "regions gain nothing from ORT; `memory_level=1` is the ORT way to save that memory.",
    )
    deepcopy_before_export: bool = switch(
        True,
        effect=Effect.EXPORT,
        group=Group.EXPORT,
        env="ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT",
        help="Exports a copy of the model, so that tracing cannot change it. Off saves one copy of the weights during "
        "the export.",
    )
    export_cache_dir: str = switch(
        "",
        effect=Effect.EXPORT,
        group=Group.EXPORT,
        env="ORTMODULE_CACHE_DIR",
        help="Folder that keeps exported graphs for the next process; empty for none. Saves the export's time.",
    )
    symbolic_shape_inference: bool = switch(
        True,
        effect=Effect.EXPORT,
        group=Group.EXPORT,
        help="Works out the shapes in the exported graph in terms of batch and sequence length. Off, ORT knows fewer "
        "shapes: it optimises less and predicts no memory savings.",
    )
    static_shape: bool = switch(
        False,
        effect=Effect.GRAPH,
        group=Group.EXPORT,
        help="Builds the gradient graph for the first batch's shapes only. Can save time; every new shape then needs a "
        "new graph.",
    )
    skip_check: tuple[str, ...] = switch(
        ("DEVICE", "BUILD_GRADIENT", "EXECUTION_AGENT"),
        effect=Effect.STEP,
        group=Group.EXPORT,
        env="ORTMODULE_SKIPCHECK_POLICY",
        choices=("DEVICE", "BUILD_GRADIENT", "EXECUTION_AGENT"),
        help="Which checks every step after the first leaves out: has the device changed, has the model or its input "
        "changed, must the session be made anew. Saves a little time per step; empty checks all.",
    )
    fallback: bool = switch(
        False,
        effect=Effect.STEP,
        group=Group.EXPORT,
        env="ORTMODULE_FALLBACK_POLICY",
        ort_default=True,
        help="Lets PyTorch compute the model if ORT cannot. ORTModule has it on and says little; ortlab has it off, so "
        "that you hear of the failure, and marks each run that fell back.",
    )
    fallback_policy: str = switch(
        "DEFAULT",
        effect=Effect.STEP,
        group=Group.EXPORT,
        env="ORTMODULE_FALLBACK_POLICY",
        choices=(
            "DEFAULT",
            "FORCE_TORCH_FORWARD",
            "FORCE_TORCH_BACKWARD",
            "UNSUPPORTED_DEVICE",
            "UNSUPPORTED_DATA",
            "UNSUPPORTED_TORCH_MODEL",
            "UNSUPPORTED_ONNX_MODEL",
            "BAD_INITIALIZATION",
        ),
        part_of="fallback",
        help="Which failures fall back. DEFAULT is the four UNSUPPORTED_ kinds: device, data, PyTorch model and ONNX "
        "model.",
    )
    fallback_retry: bool = switch(
        False,
        effect=Effect.STEP,
        group=Group.EXPORT,
        env="ORTMODULE_FALLBACK_RETRY",
        part_of="fallback",
        help="Tries ORT again in each step after a fallback. Off, PyTorch computes all the steps that follow.",
    )

    # --- logging -------------------------------------------------------------------------------------------------
    log_level: str = switch(
        "WARNING",
        effect=Effect.SESSION,
        group=Group.LOGGING,
        env="ORTMODULE_LOG_LEVEL",
        choices=("VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"),
        help="How much ORT tells. INFO adds the memory plans and the traced graph, DEVINFO ORT's own messages on every "
        "rank, VERBOSE all there is. More text slows the build, hardly the steps.",
    )
    save_onnx: bool = switch(
        False,
        effect=Effect.EXPORT,
        group=Group.LOGGING,
        help="Writes the five ONNX graphs of each build to files: exported, post-processed, optimised before the "
        "gradient, with gradient, and as executed.",
    )
    save_onnx_prefix: str = switch(
        "",
        effect=Effect.EXPORT,
        group=Group.LOGGING,
        part_of="save_onnx",
        help="Start of the file names of saved graphs; empty for the name of the model's class.",
    )
    save_onnx_path: str = switch(
        "",
        effect=Effect.EXPORT,
        group=Group.LOGGING,
        env="ORTMODULE_SAVE_ONNX_PATH",
        part_of="save_onnx",
        help="Folder for saved graphs; empty for the current one.",
    )
    print_input_density: bool = switch(
        False,
        effect=Effect.GRAPH,
        group=Group.LOGGING,
        env="ORTMODULE_PRINT_INPUT_DENSITY",
        help="Prints in each step which part of the labels and tokens is not padding, where a sparsity switch found "
        "some. Tells whether shorter padding would save time.",
    )
    print_memory_stats: bool = switch(
        False,
        effect=Effect.STEP,
        group=Group.LOGGING,
        env="ORTMODULE_PRINT_MEMORY_STATS",
        needs=(Need.CUDA,),
        help="Prints GPU memory before and after forward and backward, in steps 0 to 9 and then at powers of two; needs "
        "`log_level` INFO or lower.",
    )

    # --- experimental --------------------------------------------------------------------------------------------
    efficient_attention: bool = switch(
        False,
        effect=Effect.IMPORT,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_USE_EFFICIENT_ATTENTION",
        needs=(Need.CUDA,),
        help="Replaces attention patterns in the graph by PyTorch's memory-efficient attention. Saves time and memory "
        "with long sequences; numbers change by rounding only.",
    )
    sdpa_fallback: bool = switch(
        False,
        effect=Effect.IMPORT,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_ATEN_SDPA_FALLBACK",
        needs=(Need.CUDA,),
        help="Exports `scaled_dot_product_attention` as one call to PyTorch's efficient attention instead of in pieces. "
        "Saves time and memory with long sequences.",
    )
    flash_attention: bool = switch(
        False,
        effect=Effect.IMPORT,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_USE_FLASH_ATTENTION",
        needs=(Need.CUDA, Need.AMPERE, Need.TRITON, Need.TRITON_BUILD),
        help="Replaces attention patterns in the graph by a Triton flash attention. Saves time and memory with long "
        "sequences; works in half precision.",
    )
    triton: bool = switch(
        False,
        effect=Effect.WRAP,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_USE_TRITON",
        needs=(Need.CUDA, Need.TRITON, Need.TRITON_BUILD),
        help="Fuses chains of elementwise and reduction operators into Triton kernels, compiled at the first step. "
        "Slower start, faster steps. Once on, it stays on until the kernel restarts.",
    )
    triton_config_file: str = switch(
        "",
        effect=Effect.SESSION,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_TRITON_CONFIG_FILE",
        part_of="triton",
        help="JSON file that says which operators Triton may fuse, and from how many on; empty for ORT's own list.",
    )
    triton_debug: bool = switch(
        False,
        effect=Effect.IMPORT,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_TRITON_DEBUG",
        part_of="triton",
        help="Writes the fused graphs and their Triton source into the folder `triton_debug`.",
    )
    tuning: bool = switch(
        False,
        effect=Effect.SESSION,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_ENABLE_TUNING",
        needs=(Need.CUDA,),
        help="Times the variants of tunable GPU kernels in the first steps and keeps the fastest. Slower start, "
        "faster steps.",
    )
    tuning_max_duration_ms: int = switch(
        0,
        effect=Effect.SESSION,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_MAX_TUNING_DURATION_MS",
        minimum=0,
        part_of="tuning",
        help="Longest time for tuning one kernel, in milliseconds; 0 for no limit.",
    )
    # Not part_of tuning: 1.19.2 writes the file while tuning is on and reads it while tuning is off.
    tuning_results_path: str = switch(
        "",
        effect=Effect.SESSION,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_TUNING_RESULTS_PATH",
        help="Folder of tuning results: written while `tuning` is on, used while it is off; empty for none.",
    )
    zero_stage3: bool = switch(
        False,
        effect=Effect.WRAP,
        group=Group.EXPERIMENTAL,
        env="ORTMODULE_ENABLE_ZERO_STAGE3",
        needs=(Need.CUDA, Need.DEEPSPEED),
        help="Works with DeepSpeed ZeRO stage 3, which spreads the weights over the GPUs. Once on, it stays on until "
        "the kernel restarts.",
    )

    def __post_init__(self) -> None:
        """Read text into values and refuse what cannot be."""
        for one in switches():
            object.__setattr__(self, one.name, one.read(getattr(self, one.name)))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.memory_level > 0 and self.memory_plan:
            raise OptionError(
                f"memory_level={self.memory_level} and memory_plan contradict each other.",
                why="Levels 1 and 2 choose the plans themselves and ignore a list of plans.",
                fix="Set memory_level=0 to use the plans, or memory_plan=() to use the level.",
            )
        if self.mem_efficient_grad_management and not self.custom_autograd:
            raise OptionError(
                "mem_efficient_grad_management needs custom_autograd.",
                why="It hands gradients over through a custom autograd Function.",
                fix="Set custom_autograd=True, or leave mem_efficient_grad_management off.",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> tuple[Options, tuple[str, ...]]:
        """Read the ORTMODULE_* variables, of 1.19.2 and of earlier releases.

        Parameters
        ----------
        environ
            Usually `os.environ`; it is not changed.

        Returns
        -------
        options : Options
            The defaults, with the variables that are set put over them.
        notes : tuple of str
            One sentence for each variable that was translated, ignored, or sets a value other than the default.

        Raises
        ------
        OptionError
            A variable has a value that makes no sense; the message names the variable.
        """
        changes, notes = environment.read(environ, switches())
        try:
            return cls()._changed_to(changes), notes
        except OptionError as error:
            names = ", ".join(one.env for one in switches() if one.name in changes)
            raise OptionError(
                f"The environment variables {names} contradict each other.", why=str(error), fix="Unset one of them."
            ) from None

    def environment(self, memory_plan_file: Path | None = None) -> dict[str, str]:
        """Write the options as the variables that 1.19.2 reads, for use inside a build.

        Parameters
        ----------
        memory_plan_file
            File that the caller has written `memory_plan` to, as a JSON list: 1.19.2 takes plans from a file only.

        Returns
        -------
        dict of str to str
            Variables to set. Every other name in `variables()` has to be unset for the build: for some of them even
            an empty value means "on".

        Raises
        ------
        ValueError
            `memory_plan` is not empty, and no file is given.
        """
        if self.memory_plan and memory_plan_file is None:
            message = "memory_plan is set: write it to a JSON file and pass its path"
            raise ValueError(message)
        values = {one.name: getattr(self, one.name) for one in switches()}
        return environment.write(values, switches(), memory_plan_file)

    def replace(self, **changes: object) -> Options:
        """Make a record with some options changed.

        Parameters
        ----------
        **changes
            Options by name. Text is read: "on", "0", "info", "Gelu+:1:-1,Cast+:1:-1".

        Raises
        ------
        OptionError
            An option is unknown (the near name is suggested), a value has the wrong type, or two contradict.
        """
        for name in changes:
            _declaration(name)
        return self._changed_to(changes)

    def _changed_to(self, changes: Mapping[str, object]) -> Options:
        # A default that is on under a switch that is off is harmless, a wish for it is not: only the changes
        # tell the two apart.
        result = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        for name in changes:
            parent = _declaration(name).part_of
            if parent and getattr(result, name) is True and not getattr(result, parent):
                raise OptionError(
                    f"{name} is on, but {parent} is off.",
                    why=f"{name} is a part of {parent} and does nothing without it.",
                    fix=f"Set {parent}=True as well, or leave {name} out.",
                )
        return result

    def changed(self, other: Options) -> tuple[str, ...]:
        """Names of the options whose values differ, in the order of declaration."""
        return tuple(one.name for one in switches() if getattr(self, one.name) != getattr(other, one.name))

    def stage_of_change(self, other: Options) -> Effect | None:
        """Earliest stage that has to be redone to go from these options to others; None if nothing has to be.

        An option that is part of one that is off does not act, so its changes do not count.
        """
        effects = [one.effect for one in switches() if self._acting(one) != other._acting(one)]
        return min(effects, default=None)

    def _acting(self, one: Switch) -> Value:
        if one.part_of and not getattr(self, one.part_of):
            return False
        value: Value = getattr(self, one.name)
        return value

    def to_dict(self) -> dict[str, bool | int | str | list[str]]:
        """Every option as JSON can hold it."""
        values = {one.name: getattr(self, one.name) for one in switches()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Options:
        """Read what `to_dict` wrote; options that are missing get their defaults.

        Raises
        ------
        OptionError
            As for `replace`.
        """
        for name in values:
            _declaration(name)
        return dataclasses.replace(cls(), **values)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """Show the options that differ from their defaults."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.changed(_defaults()))
        return f"Options({shown})"


@functools.cache
def switches() -> tuple[Switch, ...]:
    """Every switch, in the order of declaration."""
    return declared(Options)


@functools.cache
def _by_name() -> Mapping[str, Switch]:
    return {one.name: one for one in switches()}


@functools.cache
def _defaults() -> Options:
    return Options()


def _declaration(name: str) -> Switch:
    try:
        return _by_name()[name]
    except KeyError:
        near = difflib.get_close_matches(name, _by_name(), n=1, cutoff=0.5)
        raise OptionError(
            f"There is no option {name!r}.",
            fix=f"Did you mean {near[0]!r}?" if near else "`ortlab.options.table()` lists all options.",
        ) from None


def variables() -> frozenset[str]:
    """Every ORTMODULE_* variable that 1.19.2 reads and an option stands for."""
    return frozenset(one.env for one in switches() if one.env)


def unmet(switch_name: str, have: Collection[Need]) -> str:
    """Say why a switch cannot act here.

    Parameters
    ----------
    switch_name
        Name of an option.
    have
        What is present: `ortlab.engine.installation.have()`.

    Returns
    -------
    str
        The first reason and how to mend it, in one sentence; "" if nothing is missing.

    Raises
    ------
    OptionError
        There is no such option.
    """
    one = _declaration(switch_name)
    needs = one.needs + (_declaration(one.part_of).needs if one.part_of else ())
    return next((f"{switch_name} {REASONS[need]}." for need in needs if need not in have), "")


def check_needs(options: Options, have: Collection[Need]) -> None:
    """Refuse options that were changed from their defaults and cannot act here.

    A default that cannot act (`embedding_sparse_optimizer` without a GPU) does no harm and is let pass; so is an
    option that was switched off.

    Raises
    ------
    OptionError
        The needs of at least one such option are not met.
    """
    for name in options.changed(_defaults()):
        reason = unmet(name, have)
        if getattr(options, name) and reason:
            raise OptionError(f"{name} cannot act on this machine.", why=reason, fix=f"Leave {name} at its default.")


def table() -> pd.DataFrame:
    """Every switch as a row: name, default, effect, group, needs, variables, help."""
    import pandas as pd  # noqa: PLC0415 - records are imported without it

    rows = [
        {
            "name": one.name,
            "default": one.default,
            "type": one.type.__name__,
            "choices": one.choices,
            "effect": one.effect.name.lower(),
            "group": one.group.value,
            "needs": tuple(need.value for need in one.needs),
            "env": one.env,
            "older_env": one.older_env,
            "help": one.help,
        }
        for one in switches()
    ]
    return pd.DataFrame(rows).set_index("name")


def markdown() -> str:
    """Every switch as a Markdown table for each group, for the documentation."""
    parts = []
    for group in Group:
        parts.append(f"### {group.value.capitalize()}\n")
        parts.append("| option | default | acts from | variable | what it does |\n|---|---|---|---|---|")
        for one in switches():
            if one.group is group:
                needs = "".join(f" It {REASONS[need]}." for need in one.needs)
                variable = f"`{one.env}`" if one.env else ""
                row = (f"`{one.name}`", f"`{one.default!r}`", one.effect.name.lower(), variable, one.help + needs)
                parts.append("| " + " | ".join(row) + " |")
        parts.append("")
    return "\n".join(parts)
