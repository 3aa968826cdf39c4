"""What a lab shows of what its model keeps for backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ortlab.memory.stash import Stash, merged

if TYPE_CHECKING:
    import torch

    from ortlab.engine.ort import OrtEngine


class StashView(ABC):
    """The base of `Lab` that reads the stash; the abstract parts are the lab's."""

    module: torch.nn.Module

    def stash(
        self,
        part: str | None = None,
        *,
        plans: bool = False,
        sizes: Mapping[str, int] | None = None,
        progress: bool = True,
    ) -> Stash:
        """Read what the graph that runs keeps for its backward, with the present memory plans applied.

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
        Stash
            The activations, the largest first. Bytes are worked out from shapes, for the sizes of the batch that the
            graph was built with; `Stash.at` evaluates them for others.

        Raises
        ------
        OptionError
            If there is no such part.
        BuildError
            If no training graph has been built yet for the present options.

        Examples
        --------
        >>> lab.stash().by("operator")[0]
        StashGroup(name='Gelu', count=12, bytes=100663296, unknown=0)
        """
        engines = self._engines(part)
        stashes = {
            path: self._stash(engine, path, plans=plans, sizes=sizes or {}, progress=progress)
            for path, engine in engines.items()
            if engine.built_options or len(engines) == 1
        }
        if len(engines) == 1:
            return next(iter(stashes.values()))
        if not stashes:  # says what to do
            return self._stash(next(iter(engines.values())), "", plans=False, sizes={}, progress=False)
        return merged(stashes, missing=tuple(path for path in engines if path not in stashes))

    def _stash(
        self, engine: OrtEngine, path: str, *, plans: bool, sizes: Mapping[str, int], progress: bool
    ) -> Stash:
        from ortlab.engine.stash import read_stash, with_plans

        execution = engine.execution
        stash = read_stash(execution, self.module, part=path, sizes=sizes)
        if not plans:
            return stash
        from tqdm import tqdm

        configs = sorted(execution.memory_report().savings)
        # With disable=None tqdm draws on terminals only; a notebook shows the panel's bar instead.
        with tqdm(total=len(configs), unit="plan", leave=False, disable=None if progress else True) as bar:

            def tell(text: str, fraction: float) -> None:
                bar.update(round(fraction * len(configs)) - bar.n)
                self._report_progress(text, fraction)

            return with_plans(stash, execution, self.module, configs, part=path, tell=tell)

    @abstractmethod
    def _engines(self, part: str | None) -> dict[str, OrtEngine]: ...

    @abstractmethod
    def _report_progress(self, text: str, fraction: float) -> None: ...
