"""The experimental switches."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.options.switches import Effect, Need, switch


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
