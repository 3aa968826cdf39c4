"""The memory switches."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.options.switches import PLAN, Effect, Need, switch


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
    cpu_memory_arena: bool = switch(
        default=True,
        effect=Effect.SESSION,
        help=(
            "Lets ORT, and PyTorch's kernels inside its graphs, keep freed CPU memory for reuse. Off gives it back "
            "to the system, which makes memory figures honest and steps slower."
        ),
    )
    external_gpu_allocator: bool = switch(
        default=True,
        effect=Effect.WRAP,
        needs=(Need.CUDA,),
        help=(
            "ORT takes GPU memory from PyTorch's pool. Off, each keeps a pool of its own, and memory that "
            "one has freed is not there for the other."
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
