"""The magics about memory: what is kept for backward, what it takes, and what to do about it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ortlab.errors import ArgumentError
from ortlab.memory.saved_activations import KINDS
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.chosen_lab import chosen_lab
from ortlab.notebook.magics.command import command
from ortlab.records.memory_phases import read_phases

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.memory.device_snapshot import MemorySnapshot
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.records.memory_phases import MemoryPhases
    from ortlab.studies.batch_size import BatchSizeSearch
    from ortlab.studies.budget import Budget
    from ortlab.studies.engine_comparison import EngineComparison

_ACTIVATIONS = Parser("%ort_activations")
_ACTIVATIONS.add_argument("--by", choices=KINDS, default="")
_ACTIVATIONS.add_argument("--part", metavar="PART")
_ACTIVATIONS.add_argument("--at", nargs="+", default=[], metavar="SIZE=N")
_ACTIVATIONS.add_argument("--plans", action="store_true")
_ACTIVATIONS.add_lab()

_MEMORY = Parser("%ort_memory")
_MEMORY.add_argument("-n", metavar="STEPS")
_MEMORY.add_argument("--run", metavar="RUN")
_MEMORY.add_argument("--from", dest="file", metavar="FILE")
_MEMORY.add_argument("--snapshot", metavar="FILE")
_MEMORY.add_changes()
_MEMORY.add_lab()

_COMPARE_ENGINES = Parser("%ort_compare_engines")
_COMPARE_ENGINES.add_argument("-n", metavar="STEPS")
_COMPARE_ENGINES.add_argument("--rounds", metavar="ROUNDS")
_COMPARE_ENGINES.add_argument("--engines", metavar="ENGINE,ENGINE")
_COMPARE_ENGINES.add_argument("--budgets", metavar="BUDGET,BUDGET")
_COMPARE_ENGINES.add_argument("--also", action="append", nargs="+", default=[], metavar="option=value")
_COMPARE_ENGINES.add_argument("--no-memory", action="store_true")
_COMPARE_ENGINES.add_lab()


_BUDGET = Parser("%ort_budget", minus=True)
_BUDGET.add_argument("limit", nargs="*", metavar="LIMIT")
_BUDGET.add_argument("--device", nargs="+", metavar="SIZE")
_BUDGET.add_argument("--no-apply", action="store_true")
_BUDGET.add_argument("--no-verify", action="store_true")
_BUDGET.add_argument("--no-time", action="store_true")
_BUDGET.add_argument("--no-curve", action="store_true")
_BUDGET.add_lab()

_FIND_BATCH_SIZE = Parser("%ort_find_batch_size")
_FIND_BATCH_SIZE.add_argument("make_batch", metavar="MAKE_BATCH")
_FIND_BATCH_SIZE.add_argument("--limit", nargs="+", metavar="LIMIT")
_FIND_BATCH_SIZE.add_argument("--device", nargs="+", metavar="SIZE")
_FIND_BATCH_SIZE.add_argument("--train", metavar="TRAIN")
_FIND_BATCH_SIZE.add_argument("--sizes", metavar="SIZE,SIZE")
_FIND_BATCH_SIZE.add_argument("--plans", nargs="+", metavar="PLAN")
_FIND_BATCH_SIZE.add_argument("-n", metavar="STEPS")
_FIND_BATCH_SIZE.add_argument("--resume", action="store_true")
_FIND_BATCH_SIZE.add_lab()


@magics_class
class MemoryMagics(Magics):
    """Magics over what `Lab` knows about memory."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_ACTIVATIONS)
    def ort_activations(self, args: argparse.Namespace) -> SavedActivations:
        """Show what is kept for the backward pass: every activation, with totals by layer, operator and module.

        ::

            %ort_activations [--by layer|operator|module] [--at SIZE=N ...] [--plans] [--part PART] [--lab NAME]

        Arguments:

        - ``--by layer|operator|module``: show these totals only.
        - ``--at SIZE=N ...``: evaluate for another batch, without building anything: ``batch=16``, ``sequence=512``,
          or a dimension by its name.
        - ``--plans``: say which recompute plans remove each activation; takes a session for each plan, once.
        - ``--part PART``: path of the part to look at, where only parts of the model are wrapped; all together if not
          given.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Bytes are worked out from the shapes in the graph that runs, with the plans that are applied. Results that are
        views of each other share a buffer and are counted once.

        Example::

            %ort_activations --by operator --at batch=16

        The same in Python::

            activations = lab.activations()
            activations.at(batch=16).shown("operator")
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        found = lab.activations(args.part, plans=args.plans).at(**arguments.sizes(args.at, variables))
        return found.shown(args.by)

    @line_magic
    @no_var_expand
    @command(_MEMORY)
    def ort_memory(self, args: argparse.Namespace) -> MemoryMeasurement | MemoryPhases | MemorySnapshot:
        """Measure the memory of the last step: its peak, each phase, and what the peak is made of.

        ::

            %ort_memory [-n STEPS] [option=value ...] [--lab NAME]
            %ort_memory --run RUN [--lab NAME]
            %ort_memory --from FILE
            %ort_memory --snapshot FILE [option=value ...] [--lab NAME]

        Arguments:

        - ``-n STEPS``: how many steps to measure, after those that warm up; 2 if not given. A number or ``$name``.
        - ``option=value``: options to measure with, and ``engine=...``, as ``%ort_set`` takes them; the lab keeps its
          own.
        - ``--run RUN``: show instead what a run read at the points of its steps; it has to have been made with
          ``print_memory_stats=true``.
        - ``--from FILE``: show such readings from a log that ORTModule wrote; a path, quoted if it has spaces, or
          ``$name``.
        - ``--snapshot FILE``: name what is in the blocks of torch's CUDA allocator when the forward has ended, and
          write the whole step for torch's memory viewer, https://pytorch.org/memory_viz; a path, quoted if it has
          spaces, or ``$name``. On an NVIDIA GPU only.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        The last step is run again from its start. Afterwards, also when it fails or is interrupted, weights, optimizer,
        random state and options are as they were; nothing comes into the ledger. On a CPU, buffers are mapped one by
        one meanwhile and ONNX Runtime's arena is off, so the steps are slower, and the next one makes a new session.

        Example::

            %ort_memory memory_plan=['Gelu+:1:-1']

        The same in Python::

            measured = lab.memory(memory_plan=("Gelu+:1:-1",))
            lab.memory_snapshot().save("step.pickle")
        """
        variables = self.shell.user_ns
        if args.snapshot is not None:
            if args.n is not None or args.run is not None or args.file is not None:
                raise ArgumentError(
                    "--snapshot takes one step, so it goes with none of -n, --run and --from.",
                    fix="%ort_memory --snapshot step.pickle",
                )
            changes = arguments.changes(args.changes, variables)
            snapshot = chosen_lab(args.lab, variables).memory_snapshot(**changes)
            path = snapshot.save(arguments.path(args.snapshot, variables))
            print(f"Saved to {path}")  # noqa: T201 - the snapshot is returned, so this is the only place to say it
            return snapshot
        if args.file is not None or args.run is not None:
            if args.changes or args.n is not None or (args.file is not None and args.run is not None):
                raise ArgumentError(
                    "--run and --from show what was read before, so nothing else can be said beside one of them.",
                    fix="%ort_memory --run 1",
                )
            if args.file is not None:
                return read_phases(arguments.path(args.file, variables))
            number = arguments.number(args.run, variables, "--run")
            phases: MemoryPhases = chosen_lab(args.lab, variables).runs.run(number).memory_phases
            return phases
        steps = 2 if args.n is None else arguments.number(args.n, variables, "-n")
        changes = arguments.changes(args.changes, variables)
        return chosen_lab(args.lab, variables).memory(n=steps, **changes)

    @line_magic
    @no_var_expand
    @command(_COMPARE_ENGINES)
    def ort_compare_engines(self, args: argparse.Namespace) -> EngineComparison:
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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        how: dict[str, Any] = {
            "memory": False if args.no_memory else None,
            "also": arguments.configurations(args.also, variables),
        }
        for name in ("engines", "budgets"):
            if (given := getattr(args, name)) is not None:
                how[name] = arguments.values(given, variables)
        if args.rounds is not None:
            how["rounds"] = arguments.number(args.rounds, variables, "--rounds")
        steps = None if args.n is None else arguments.number(args.n, variables, "-n")
        return lab.compare_engines(steps, **how)

    @line_magic
    @no_var_expand
    @command(_BUDGET)
    def ort_budget(self, args: argparse.Namespace) -> Budget:
        """Switch on the recompute plans that cost least time within an amount of step memory: what a step needs.

        ::

            %ort_budget LIMIT [--no-apply] [--no-verify] [--no-time] [--no-curve] [--lab NAME]
            %ort_budget --device SIZE [...]

        Arguments:

        - ``LIMIT``: what a step may need above its start: ``70%`` of what it needs without plans, ``-30%`` for so much
          less, ``400MiB``, ``400 MiB``, or ``$name`` for a variable (a whole number is bytes).
        - ``--device SIZE``: instead, what the whole process or GPU may hold; what it holds at the start of a step is
          taken off: ``6GiB``, or ``$name``.
        - ``--no-apply``: leave the options as they are, also where the budget is met.
        - ``--no-verify``: predict only; nothing but the step without plans is run, and nothing is applied.
        - ``--no-time``: do not time steps with and without the plans; their time is predicted only.
        - ``--no-curve``: do not predict other budgets as well.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        The last step is profiled and measured without plans on ONNX Runtime, run again with those that are chosen, and
        timed with and without them. Where they miss, those that come closest are run and shown, and nothing is
        applied. When it is interrupted, the lab is as it was before.

        Example::

            %ort_budget 70%

        The same in Python::

            lab.budget("70%")
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        return lab.budget(
            _amount(args.limit, variables),
            device=_amount(args.device, variables),
            apply=not args.no_apply,
            verify=not args.no_verify,
            timed=not args.no_time,
            curve=not args.no_curve,
        )

    @line_magic
    @no_var_expand
    @command(_FIND_BATCH_SIZE)
    def ort_find_batch_size(self, args: argparse.Namespace) -> BatchSizeSearch:
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
        - ``--plans PLAN ...``: sets of plans to try where a batch does not fit without; ``Gelu+:1:-1``, or several with
          commas between them; ``$name`` for one set or a list of sets; the largest that ORT offers if not given.
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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        how: dict[str, Any] = {}
        if args.train is not None:
            how["train"] = arguments.variable(args.train, variables)
        if args.resume:
            unfinished = [search for search in lab.batch_size_searches if search.stopped]
            if not unfinished:
                raise ArgumentError(
                    "There is no search to resume.",
                    why="None of this lab was interrupted.",
                    fix="%ort_find_batch_size make_batch --limit 6GiB",
                )
            how["resume"] = unfinished[-1]
        for name in ("limit", "device"):
            if (words := getattr(args, name)) is not None:
                how[name] = _amount(words, variables)
        if args.sizes is not None:
            how["sizes"] = arguments.numbers(args.sizes, variables, "--sizes")
        if args.plans is not None:
            how["plans"] = arguments.plan_sets(args.plans, variables)
        if args.n is not None:
            how["n"] = arguments.number(args.n, variables, "-n")
        return lab.find_batch_size(arguments.variable(args.make_batch, variables), **how)


def _amount(words: Sequence[str] | None, variables: Mapping[str, object]) -> Any:
    """Join the words of an amount of memory, "400 MiB"; `$name` is what a variable holds, nothing is None."""
    text = " ".join(words or ())
    return arguments.variable(text[1:], variables) if text.startswith("$") else text or None
