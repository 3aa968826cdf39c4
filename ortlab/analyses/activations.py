"""What the graph of the present switches keeps for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ortlab.analyses.builds import builds
from ortlab.memory.saved_activations import ActivationsSource, SavedActivations, merged

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.runs.bench import Bench


def activations(
    bench: Bench,
    part: str | None = None,
    *,
    plans: bool = False,
    sizes: Mapping[str, int] | None = None,
    progress: bool = True,
) -> SavedActivations:
    """Read what the graph of the present switches keeps for its backward, with their memory plans applied.

    If it is not built yet, it is built from the last step, beside what the lab has; see `SavedActivations.note`.

    Parameters
    ----------
    part
        Path of a wrapped part of the model; None for the whole model, or for all its parts together.
    plans
        Whether to say which recompute plans remove each activation, and what each keeps instead. Each plan that
        ORT offers is applied alone, in a session that never runs: some tenths of a second each for a small model.
        What was found is kept.
    sizes
        Bytes by name of a result, as a profiled step has seen them (`Trace.sizes`): for what the graph alone does
        not tell.
    progress
        Whether to show a progress bar on a terminal while plans are looked at.

    Returns
    -------
    SavedActivations
        The activations, the largest first. Bytes are worked out from shapes, for the sizes of the batch that the
        graph was built with; `SavedActivations.at` evaluates them for others.

    Raises
    ------
    OptionError
        If there is no such part.
    BuildError
        If no step has run in this lab yet, or ONNX Runtime cannot build the training graph.

    Examples
    --------
    >>> lab.activations().by("operator")[0]
    ActivationGroup(name='Gelu', count=12, bytes=100663296, unknown=0)
    """
    with builds(bench, part) as found:
        by_part = {
            path: _activations(bench, execution, path, plans=plans, sizes=sizes or {}, progress=progress)
            for path, execution in found.executions.items()
        }
    if len(by_part) == 1 and not found.missing:
        kept = next(iter(by_part.values()))
    else:
        kept = merged(by_part, missing=found.missing)
    return replace(kept, note=found.note, source=ActivationsSource(bench.lab, part))


def _activations(
    bench: Bench, execution: Execution, path: str, *, plans: bool, sizes: Mapping[str, int], progress: bool
) -> SavedActivations:
    from ortlab.engine.saved_activations import read_activations, with_plans

    kept = read_activations(execution, bench.module, part=path, sizes=sizes)
    if not plans:
        return kept
    configs = sorted(execution.memory_report().savings)
    with bench.progress.task(show=progress) as bar:
        return with_plans(kept, execution, bench.module, configs, part=path, tell=bar.report)
