"""The magics that make many runs from one start: compare, compare engines, sweep, bisect, find a batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, magics_class

from ortlab.errors import ArgumentError
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.command import (
    LAB,
    NO_MEMORY,
    RESUME,
    ROUNDS,
    STEPS,
    Line,
    flag,
    line,
    takes,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.records.comparison import Comparison
    from ortlab.studies.batch_size import BatchSizeSearch
    from ortlab.studies.bisection import Bisection
    from ortlab.studies.engine_comparison import EngineComparison
    from ortlab.studies.sweep import Sweep


def _tolerance(word: str, variables: Mapping[str, object]) -> float:
    value = arguments.value(word, variables)
    try:
        return float(value)  # type: ignore[arg-type] # what is no number raises
    except (TypeError, ValueError):
        raise ArgumentError(f"--tolerance takes a number, not {word!r}.", fix="--tolerance 1e-5") from None


def _last(unfinished: Iterable[Any], what: str, fix: str) -> Any:
    """Return the last of what was interrupted."""
    found = list(unfinished)
    if not found:
        raise ArgumentError(
            f"There is no {what} to resume.", why="None of this lab was interrupted.", fix=fix
        )
    return found[-1]


@magics_class
class StudyMagics(Magics):
    """Magics over `Lab.compare`, `Lab.compare_engines`, `Lab.sweep`, `Lab.bisect` and `Lab.find_batch_size`."""

    shell: InteractiveShell

    @line(
        takes("words", "RUN|option=value,value", nargs="*"),
        whole("--baseline", "RUN"),
        flag("--rerun"),
        STEPS,
        ROUNDS,
        LAB,
    )
    def ort_compare(self, args: Line) -> Comparison:
        """Compare configurations with a baseline: time with an interval and a verdict, step memory, loss.

        ::

            %ort_compare option=value,value ... [-n STEPS] [--rounds ROUNDS] [--lab NAME]
            %ort_compare [RUN ...] [--baseline RUN] [--lab NAME]
            %ort_compare [RUN ...] --rerun [--baseline RUN] [-n STEPS] [--rounds ROUNDS] [--lab NAME]

        Arguments:

        - ``option=value,value``: what to try, each value by itself, beside the lab as it is set; ``engine`` may be
          among them. The last step is run from its start in turns, so that a drift of the machine meets all alike.
        - ``RUN ...``: numbers of runs, as their tables show them, which are compared as they were made;
          all runs but those of sweeps if not given.
        - ``--rerun``: run the configurations of these runs again, in turns.
        - ``--baseline RUN``: number of the run that the others are compared with; the first if not given.
        - ``-n STEPS``: steps of each turn, as many as the last step had if not given, at most 8; a number or ``$name``.
        - ``--rounds ROUNDS``: turns of each, 6 if not given.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Example::

            %ort_compare engine=eager memory_level=1,2

        The same in Python::

            comparison = lab.compare(engine="eager", memory_level=[1, 2])
        """
        lab = args.lab
        how = args.given("n", "rounds", "baseline", "rerun")
        pairs = [word for word in args.words if "=" in word]
        numbers = [
            arguments.number(word, args.variables, "%ort_compare") for word in args.words if word not in pairs
        ]
        points: list[dict[str, object]] = []
        if pairs:
            grid = arguments.grid(pairs, args.variables)
            assert isinstance(grid, dict)  # noqa: S101 - pairs make one
            points = [{name: value} for name, values in grid.items() for value in values]
        return lab.compare(*numbers, *points, **how)

    @line(
        STEPS,
        ROUNDS,
        takes("--engines", "ENGINE,ENGINE", read=arguments.values),
        takes("--budgets", "BUDGET,BUDGET", read=arguments.values),
        takes(
            "--also", "option=value", action="append", nargs="+", default=[], read=arguments.configurations
        ),
        NO_MEMORY,
        LAB,
    )
    def ort_compare_engines(self, args: Line) -> EngineComparison:
        """Run the last step on PyTorch, with checkpointed layers and compiled, beside ONNX Runtime as it is set.

        ::

            %ort_compare_engines [-n STEPS] [--rounds ROUNDS] [--engines ENGINE,ENGINE] [--budgets BUDGET,BUDGET]
                       [--also option=value ...] [--no-memory] [--lab NAME]

        Arguments:

        - ``-n STEPS``: steps of each run, as many as the last step had if not given; a number or ``$name``.
        - ``--rounds ROUNDS``: runs of each candidate, 5 if not given; they go forwards and backwards in turn.
        - ``--engines ENGINE,ENGINE``: the candidates, ``eager,checkpoint,compile`` if not given.
        - ``--budgets BUDGET,BUDGET``: activation memory budgets for torch.compile, from 0 to 1; 0.5 if not given and
          ``compile`` is among the engines.
        - ``--also option=value ...``: another configuration of ONNX Runtime in the same table, as ``%ort_set`` takes
          it; may be given several times. ``$name`` stands for a dict, or for a list of such.
        - ``--no-memory``: do not measure step memory, which takes some more steps of each candidate.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        All start from the same weights, optimizer and random state. A candidate that fails is recorded with the
        reason, and the others go on. Afterwards, or when it is interrupted, the lab is as it was before.
        torch.compile may take minutes for each budget.

        Example::

            %ort_compare_engines -n 10 --budgets 1,0.5,0.2 --also memory_level=1

        The same in Python::

            lab.compare_engines(n=10, budgets=[1, 0.5, 0.2], also=[{"memory_level": 1}])
        """
        lab = args.lab
        return lab.compare_engines(
            memory=args.memory, also=args.also, **args.given("engines", "budgets", "rounds", "n")
        )

    @line(takes("grid", "option=value,value", nargs="*", read=arguments.grid), STEPS, ROUNDS, RESUME, LAB)
    def ort_sweep(self, args: Line) -> Sweep:
        """Try every combination of some options from the start of the last step, and compare them.

        ::

            %ort_sweep option=value,value ... [engine=ort,eager,compile] [-n STEPS] [--rounds ROUNDS] [--lab NAME]
            %ort_sweep $GRID [-n STEPS] [--rounds ROUNDS] [--lab NAME]
            %ort_sweep --resume [--lab NAME]

        Arguments:

        - ``option=value,value``: the values to try; what is not named stays as the lab is set. Values are as in
          ``%ort_set``; ``$name`` stands for the values in a list. An option that holds a list takes several lists:
          ``memory_plan=[],['Gelu+:1:-1']``.
        - ``$GRID``: variable with a dict of such lists, or with a list of points (dicts).
        - ``-n STEPS``: steps of each run, as many as the last step had if not given; a number or ``$name``.
        - ``--rounds ROUNDS``: runs of each point, 1 if not given; every other round goes backwards, so that a drift of
          the machine favours no point.
        - ``--resume``: make the runs that are missing of the sweep that was interrupted last.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Every run starts from the same weights, optimizer and random state. A point that fails is recorded with the
        reason, and the sweep goes on. Afterwards, or when it is interrupted, the lab is as it was before.

        Example::

            %ort_sweep memory_level=0,1,2 engine=ort,eager -n 20 --rounds 2

        The same in Python::

            sweep = lab.sweep({"memory_level": [0, 1, 2], "engine": ["ort", "eager"]}, n=20, rounds=2)
        """
        lab = args.lab
        if args.resume:
            if args.has("grid", "n", "rounds"):
                raise ArgumentError(
                    "A sweep that is resumed has its points, steps and rounds already.",
                    fix="%ort_sweep --resume",
                )
            unfinished = (sweep for sweep in lab.sweeps if not sweep.complete)
            return lab.sweep(resume=_last(unfinished, "sweep", "%ort_sweep memory_level=0,1,2"))
        if not args.has("grid"):
            raise ArgumentError(
                "%ort_sweep needs options with the values to try.", fix="%ort_sweep memory_level=0,1,2"
            )
        how = args.given("n", "rounds")
        return lab.sweep(args.grid, **how)

    @line(
        takes("metric", "METRIC", nargs="?"),
        takes("changes", "option=value", nargs="*"),
        STEPS,
        ROUNDS,
        takes("--tolerance", "TOLERANCE", read=_tolerance),
        RESUME,
        LAB,
    )
    def ort_bisect(self, args: Line) -> Bisection:
        """Find the smallest set of switches that causes a change of numbers, time or memory, or a failure.

        ::

            %ort_bisect [METRIC] [option=value ...] [-n STEPS] [--rounds ROUNDS] [--tolerance TOLERANCE] [--lab NAME]
            %ort_bisect [METRIC] --resume [--lab NAME]

        Arguments:

        - ``METRIC``: ``loss``, which is taken if not given; ``parity``, the distance to PyTorch; ``step_ms``;
          ``peak_bytes``; or ``$name`` of a function that takes a run and returns a number.
        - ``option=value ...``: what may be responsible, as ``%ort_set`` takes it; the baseline is then the lab as it is
          set. Without, the switches that the lab has not at their defaults, and the defaults are the baseline.
        - ``-n STEPS``: steps of each run, as many as the last step had if not given; a number or ``$name``.
        - ``--rounds ROUNDS``: pairs of runs in which a set is timed, 4 if not given; up to three times as many where
          the noise hides the answer.
        - ``--tolerance TOLERANCE``: a change up to this is none; a number or ``$name``.
        - ``--resume``: go on with the bisection that was interrupted last.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        One culprit among n switches takes some log2(n) runs. Afterwards, or when it is interrupted, the lab is as it
        was before.

        Example::

            %ort_bisect step_ms aten_backward=false intra_op_spinning=true memory_level=1

        The same in Python::

            lab.bisect("step_ms", changes={"aten_backward": False, "intra_op_spinning": True, "memory_level": 1})
        """
        lab = args.lab
        how: dict[str, Any] = {}
        words: list[str] = args.changes
        metric: Any = args.metric or "loss"
        if "=" in metric:  # there is no metric on the line, and what argparse takes for it is a change
            metric, words = "loss", [metric, *words]
        if metric.startswith("$"):
            metric = arguments.variable(metric[1:], args.variables)
        if words:
            how["changes"] = arguments.changes(words, args.variables)
        how |= args.given("n", "rounds", "tolerance")
        if args.resume:
            unfinished = (one for one in lab.bisections if one.outcome == "unfinished")
            how["resume"] = _last(
                unfinished, "bisection", "%ort_bisect loss memory_level=1 aten_backward=false"
            )
        return lab.bisect(metric, **how)

    @line(
        takes("make_batch", "MAKE_BATCH", read=arguments.variable),
        takes("--limit", "LIMIT", nargs="+", read=arguments.amount),
        takes("--device", "SIZE", nargs="+", read=arguments.amount),
        takes("--train", "TRAIN", read=arguments.variable),
        takes("--sizes", "SIZE,SIZE", read=lambda word, held: arguments.numbers(word, held, "--sizes")),
        takes("--plans", "PLAN", nargs="+", read=arguments.plan_sets),
        STEPS,
        RESUME,
        LAB,
    )
    def ort_find_batch_size(self, args: Line) -> BatchSizeSearch:
        """Look for the batch size, and the recompute plans, that train most samples per second under a limit.

        ::

            %ort_find_batch_size MAKE_BATCH --limit LIMIT [--train TRAIN] [--sizes SIZE,SIZE] [--plans PLAN ...]
                      [-n STEPS] [--lab NAME]
            %ort_find_batch_size MAKE_BATCH --device SIZE [...]
            %ort_find_batch_size MAKE_BATCH --resume [--train TRAIN] [--lab NAME]

        Arguments:

        - ``MAKE_BATCH``: name of a function; called with a size, it returns a batch of so many samples.
        - ``--limit LIMIT``: what a step may need above its start: ``6GiB``, ``900 MiB``, or ``$name``.
        - ``--device SIZE``: instead, what the whole process (on a CPU) or torch's allocator (on CUDA) may hold.
        - ``--train TRAIN``: name of a function that takes one training step with a batch; forward, loss and backward if
          not given.
        - ``--sizes SIZE,SIZE``: batch sizes to try; powers of two from 1 if not given; ``$name`` for a list.
        - ``--plans PLAN ...``: what to recompute where a batch does not fit without; ``Gelu+:1:-1``,
          ``recompute=layers``, or several with commas between them; ``$name`` for one set or a list of sets; the
          largest that ORT offers, layers, and layers but linear if not given.
        - ``-n STEPS``: timed steps of each run, 3 if not given; a number or ``$name``.
        - ``--resume``: go on with the search that was interrupted last.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        A batch that is predicted not to fit is not run; one that runs out of memory all the same is written down, and
        the next one runs. Afterwards, or when it is interrupted, the lab is as it was before.

        Example::

            %ort_find_batch_size make_batch --limit 6GiB --plans Gelu+:1:-1

        The same in Python::

            lab.find_batch_size(make_batch, limit="6 GiB", plans=["Gelu+:1:-1"])
        """
        lab = args.lab
        how = args.given("train")
        if args.resume:
            unfinished = (search for search in lab.batch_size_searches if search.stopped)
            fix = "%ort_find_batch_size make_batch --limit 6GiB"
            how["resume"] = _last(unfinished, "search", fix)
        how |= args.given("limit", "device", "sizes", "plans", "n")
        return lab.find_batch_size(args.make_batch, **how)
