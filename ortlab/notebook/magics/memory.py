"""The magics about memory: what is kept for backward, what it takes, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, magics_class

from ortlab.errors import ArgumentError, BuildError, StepError, WrapError
from ortlab.memory.plan import MemoryPlan
from ortlab.memory.saved_activations import KINDS
from ortlab.memory.saved_plans import SavedPlans, read_saved
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.command import CHANGES, LAB, PART, STEPS, Line, flag, line, no, takes, whole
from ortlab.records.memory_phases import read_phases

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.memory.device_snapshot import MemorySnapshot
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.saved_activations import SavedActivations
    from ortlab.records.memory_phases import MemoryPhases
    from ortlab.studies.budget import Budget

_AT = takes("--at", "SIZE=N", nargs="+", default=[], read=arguments.sizes)


@magics_class
class MemoryMagics(Magics):
    """Magics over what `Lab` knows about memory."""

    shell: InteractiveShell

    @line(takes("--by", choices=KINDS, default=""), PART, _AT, flag("--plans"), LAB)
    def ort_activations(self, args: Line) -> SavedActivations:
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
        return args.lab.activations(args.part, plans=args.plans).at(**args.at).shown(args.by)

    @line(
        STEPS,
        whole("--run", "RUN"),
        takes("--from", "FILE", dest="file", read=arguments.path),
        takes("--snapshot", "FILE", read=arguments.path),
        CHANGES,
        LAB,
    )
    def ort_memory(self, args: Line) -> MemoryMeasurement | MemoryPhases | MemorySnapshot:
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
        if args.has("snapshot"):
            if args.has("n", "run", "file"):
                raise ArgumentError(
                    "--snapshot takes one step, so it goes with none of -n, --run and --from.",
                    fix="%ort_memory --snapshot step.pickle",
                )
            changes = args.changes
            snapshot = args.lab.memory_snapshot(**changes)
            path = snapshot.save(args.snapshot)
            print(f"Saved to {path}")  # noqa: T201 - the snapshot is returned, so this is the only place to say it
            return snapshot
        if args.has("file", "run"):
            if args.has("changes", "n") or (args.has("file") and args.has("run")):
                raise ArgumentError(
                    "--run and --from show what was read before, so nothing else can be said beside one of them.",
                    fix="%ort_memory --run 1",
                )
            if args.has("file"):
                return read_phases(args.file)
            number = args.run
            phases: MemoryPhases = args.lab.runs.run(number).memory_phases
            return phases
        how = args.given("n") | args.changes
        return args.lab.memory(**how)

    @line(
        takes("limit", "LIMIT", nargs="*", read=arguments.amount),
        takes("--device", "SIZE", nargs="+", read=arguments.amount),
        no("apply"),
        no("verify"),
        no("time"),
        no("curve"),
        LAB,
        minus=True,
    )
    def ort_budget(self, args: Line) -> Budget:
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
        return args.lab.budget(
            args.limit,
            device=args.device,
            apply=args.apply,
            verify=args.verify,
            timed=args.time,
            curve=args.curve,
        )

    @line(
        PART,
        _AT,
        flag("--costs"),
        whole("--measure", "PLANS"),
        takes("--level", "LEVEL", choices=("1", "2"), read=lambda word, _: int(word)),
        takes("--from", "FILE", dest="source", read=arguments.path),
        takes("--write", "PATH", read=arguments.path),
        takes("--dialect", "YEAR", choices=("2022", "2023", "2024", "record")),
        LAB,
    )
    def ort_plan(self, args: Line) -> MemoryPlan | SavedPlans:
        """Show what each recompute plan, and what ortlab recomputes itself, would save; read and write plans.

        ::

            %ort_plan [--part PART] [--at SIZE=N ...] [--level LEVEL] [--write PATH [--dialect YEAR]] [--lab NAME]
            %ort_plan --costs [--measure PLANS] [--lab NAME]
            %ort_plan --from FILE [--part PART] [--write PATH [--dialect YEAR]] [--lab NAME]

        Arguments:

        - ``--part PART``: path of the part to look at, where only parts of the model are wrapped; all together if not
          given.
        - ``--at SIZE=N ...``: evaluate for another batch, without building anything: ``batch=16``, ``sequence=512``,
          ``label_density=0.15``, or a symbol by its name.
        - ``--costs``: profile the last step, and predict what each plan takes off its peak and adds to its time.
        - ``--measure PLANS``: run so many plans as well, those with the most bytes for each ms; a number or ``$name``.
        - ``--level LEVEL``: the plans that memory level 1 or 2 stands for.
        - ``--from FILE``: read plans from a configuration or an old log instead, whichever release wrote it, and say
          which of them this model has. A path, quoted if it has spaces, or ``$name`` for a variable that holds the
          path or the text itself.
        - ``--write PATH``: file to write the plans to that are switched on, here or in ``--from``; a path or
          ``$name``.
        - ``--dialect YEAR``: how: ``2024`` (a JSON list, which 1.19.2 reads, and what is taken if not given),
          ``2023`` (``Gelu+:1:-1,...``) or ``2022`` (``Gelu:1,...``); ``record`` writes all that is shown, for
          ``ortlab.memory.MemoryPlan.load``.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Savings are ORT's predictions for the shapes of the first batch, in bytes. Switch a plan on with
        ``%ort_set memory_plan=...``, or all of a kind with ``%ort_set memory_level=1``; what ortlab recomputes
        itself with ``%ort_set recompute=layers``.

        Example::

            %ort_plan
            %ort_plan --at batch=32
            %ort_plan --costs --measure 3
            %ort_plan --from train_2023.log
            %ort_plan --write plans.json

        The same in Python::

            plan = lab.plan()
            plan.at(batch=32)
            lab.plan(costs=True, measure=3)
            ortlab.memory.read_saved("train_2023.log").against(plan)
            plan.save("plans.json")
        """
        if args.has("dialect") and not args.has("write"):
            raise ArgumentError(
                "--dialect says how --write writes.", fix="Add --write PATH, or leave it out."
            )
        if args.has("source") and args.has("at"):
            raise ArgumentError(
                "--at and --from do not go together.",
                why="The figures of a log are for the batch of its own run.",
                fix="Leave one of the two out.",
            )
        found = _saved_plans(args) if args.has("source") else _plan(args)
        if isinstance(found, MemoryPlan) and args.has("at"):
            found = found.at(**args.at)
        if args.has("write"):
            path = found.save(args.write, dialect=args.dialect or "2024")
            print(f"Saved to {path}")  # noqa: T201 - the plan is returned, so this is the only place to say it
        return found


def _plan(args: Line) -> MemoryPlan:
    """Read the plans, with their costs if the line asks for them."""
    lab = args.lab
    if args.has("measure") and not args.costs:
        raise ArgumentError("--measure belongs to --costs.", fix="%ort_plan --costs --measure 3")
    if args.costs and args.has("part", "level"):
        raise ArgumentError("--costs goes with neither --part nor --level.", fix="%ort_plan --costs")
    if args.costs:
        return lab.plan(costs=True, **args.given("measure"))
    return lab.plan(args.part, level=args.level)


def _saved_plans(args: Line) -> SavedPlans:
    """Read saved plans, and compare them with the model if one has been built."""
    from ortlab.lab.lab import latest  # not before a magic is used: it loads torch

    saved = read_saved(args.source)
    lab = args.lab if args.has("lab") else latest()
    if lab is None:
        return saved
    try:
        return saved.against(lab.plan(args.part))
    except (BuildError, StepError, WrapError) as error:
        print(f"Not compared with the model: {error.what}")  # noqa: T201 - as above
        return saved
