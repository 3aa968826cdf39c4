"""Peak memory of the demo's steps, each configuration in a process of its own: `python -m ortlab.demo_peak`.

In a process that has trained before, memory that its allocators keep hides what a configuration needs, so the demo
asks here. Two settings make the resident set follow the live buffers: glibc maps every buffer of 64 KiB or more on
its own and unmaps it when it is freed, and ONNX Runtime's arena is off. Both cost time, which is not measured here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

from ortlab.errors import OrtlabError, StepError
from ortlab.masked_language import Setting, prepare
from ortlab.runs import PeakMemory

WARM_UP_STEPS, MEASURED_STEPS = 2, 3

_LARGE_BUFFERS_ARE_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure(setting: Setting, engine: str, memory_plan: tuple[str, ...] = ()) -> PeakMemory | None:
    """Measure one configuration in a fresh process.

    Parameters
    ----------
    setting
        The size of the experiment.
    engine
        "ort", "eager", "checkpoint" or "compile"; see `ortlab.lab.Lab.set`.
    memory_plan
        Recompute plans to switch on.

    Returns
    -------
    PeakMemory or None
        Of `MEASURED_STEPS` steps after `WARM_UP_STEPS`; its start holds libraries, weights and optimizer state. None
        where the platform cannot tell.

    Raises
    ------
    StepError
        If the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps([asdict(setting), engine, memory_plan])],
        env={**os.environ, **_LARGE_BUFFERS_ARE_MAPPED},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise StepError(
            f"The process that measures the peak memory of {engine!r} failed.",
            why=lines[-1] if lines else f"It ended with code {done.returncode}.",
            fix="Run ortlab doctor.",
        )
    record = json.loads(done.stdout.splitlines()[-1])
    return PeakMemory(**record) if record else None


def main(argument: str) -> None:
    """Train in this process and print the peak as JSON, or null.

    Parameters
    ----------
    argument
        JSON list of a setting's fields, the engine and the plans.
    """
    import ortlab

    fields, engine, plans = json.loads(argument)
    model, step = prepare(Setting(**fields))
    options = ortlab.Options(memory_plan=tuple(plans), cpu_memory_arena=False)
    lab = ortlab.wrap(model, engine=engine, options=options)
    lab.step(step, n=WARM_UP_STEPS, progress=False)
    memory = lab.step(step, n=MEASURED_STEPS, progress=False).memory
    print(json.dumps(memory and asdict(replace(memory, scope="fresh process"))))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OrtlabError as error:
        sys.exit(" ".join(filter(None, (error.what, error.why))))
