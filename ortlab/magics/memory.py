"""The magics about memory: what is kept for backward, what it takes, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ortlab.errors import ArgumentError
from ortlab.magics import arguments
from ortlab.magics.arguments import Parser
from ortlab.magics.chosen_lab import chosen_lab
from ortlab.magics.command import command
from ortlab.memory.phases import read_phases
from ortlab.memory.stash import KINDS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.budgets.budget import Budget
    from ortlab.hunting.batch_hunt import BatchHunt
    from ortlab.memory.device_snapshot import MemorySnapshot
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.memory.phases import MemoryPhases
    from ortlab.memory.stash import Stash
    from ortlab.peers.peers import Peers

_STASH = Parser("%ort_stash")
_STASH.add_argument("--by", choices=KINDS, default="")
_STASH.add_argument("--part", metavar="PART")
_STASH.add_argument("--at", nargs="+", default=[], metavar="SIZE=N")
_STASH.add_argument("--plans", action="store_true")
_STASH.add_lab()

_MEMORY = Parser("%ort_memory")
_MEMORY.add_argument("-n", metavar="STEPS")
_MEMORY.add_argument("--run", metavar="RUN")
_MEMORY.add_argument("--from", dest="file", metavar="FILE")
_MEMORY.add_argument("--snapshot", metavar="FILE")
_MEMORY.add_changes()
_MEMORY.add_lab()

_PEERS = Parser("%ort_peers")
_PEERS.add_argument("-n", metavar="STEPS")
_PEERS.add_argument("--rounds", metavar="ROUNDS")
_PEERS.add_argument("--engines", metavar="ENGINE,ENGINE")
_PEERS.add_argument("--budgets", metavar="BUDGET,BUDGET")
_PEERS.add_argument("--also", action="append", nargs="+", default=[], metavar="option=value")
_PEERS.add_argument("--no-memory", action="store_true")
_PEERS.add_lab()


_BUDGET = Parser("%ort_budget")
_BUDGET.add_argument("limit", nargs="*", metavar="LIMIT")
_BUDGET.add_argument("--saving", metavar="SHARE")
_BUDGET.add_argument("--apply", action="store_true")
_BUDGET.add_argument("--no-verify", action="store_true")
_BUDGET.add_argument("--no-curve", action="store_true")
_BUDGET.add_lab()

_HUNT = Parser("%ort_hunt")
_HUNT.add_argument("make_batch", metavar="MAKE_BATCH")
_HUNT.add_argument("--limit", nargs="+", metavar="LIMIT")
_HUNT.add_argument("--train", metavar="TRAIN")
_HUNT.add_argument("--sizes", metavar="SIZE,SIZE")
_HUNT.add_argument("--plans", nargs="+", metavar="PLAN")
_HUNT.add_argument("-n", metavar="STEPS")
_HUNT.add_argument("--resume", action="store_true")
_HUNT.add_lab()


@magics_class
class MemoryMagics(Magics):
    """Magics over what `Lab` knows about memory."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_STASH)
    def ort_stash(self, args: argparse.Namespace) -> Stash:
        """Show what is kept for the backward pass: every activation, with totals by layer, operator and module.

        ::

            %ort_stash [--by layer|operator|module] [--at SIZE=N ...] [--plans] [--part PART] [--lab NAME]

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

            %ort_stash --by operator --at batch=16

        The same in Python::

            stash = lab.stash()
            stash.at(batch=16).shown("operator")
        """
        from ortlab.widgets.stash_display import remember

        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        found = lab.stash(args.part, plans=args.plans).at(**arguments.sizes(args.at, variables))
        return remember(found.shown(args.by), lab, args.part)

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

            measured = lab.measure_memory(memory_plan=("Gelu+:1:-1",))
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
        return chosen_lab(args.lab, variables).measure_memory(steps=steps, **changes)

    @line_magic
    @no_var_expand
    @command(_PEERS)
    def ort_peers(self, args: argparse.Namespace) -> Peers:
        """Run the last step on PyTorch, with checkpointed layers and compiled, beside ONNX Runtime as it is set.

        ::

            %ort_peers [-n STEPS] [--rounds ROUNDS] [--engines ENGINE,ENGINE] [--budgets BUDGET,BUDGET]
                       [--also option=value ...] [--no-memory] [--lab NAME]

        Arguments:

        - ``-n STEPS``: steps of each run, as many as the last step had if not given; a number or ``$name``.
        - ``--rounds ROUNDS``: runs of each peer, 3 if not given; they go forwards and backwards in turn.
        - ``--engines ENGINE,ENGINE``: the peers, ``eager,checkpoint,compile`` if not given.
        - ``--budgets BUDGET,BUDGET``: activation memory budgets for torch.compile, from 0 to 1; 0.5 if not given and
          ``compile`` is among the engines.
        - ``--also option=value ...``: another configuration of ONNX Runtime in the same table, as ``%ort_set`` takes
          it; may be given several times. ``$name`` stands for a dict, or for a list of such.
        - ``--no-memory``: do not measure the memory of each peer by itself.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        All start from the same weights, optimizer and random state. A peer that fails is recorded with the reason, and
        the others go on. Afterwards, or when it is interrupted, the lab is as it was before. torch.compile may take
        minutes for each budget.

        Example::

            %ort_peers -n 10 --budgets 1,0.5,0.2 --also memory_level=1

        The same in Python::

            lab.peers(n=10, budgets=[1, 0.5, 0.2], also=[{"memory_level": 1}])
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        how: dict[str, Any] = {
            "memory": not args.no_memory,
            "also": arguments.configurations(args.also, variables),
        }
        for name in ("engines", "budgets"):
            if (given := getattr(args, name)) is not None:
                how[name] = arguments.values(given, variables)
        if args.rounds is not None:
            how["rounds"] = arguments.number(args.rounds, variables, "--rounds")
        steps = None if args.n is None else arguments.number(args.n, variables, "-n")
        return lab.peers(steps, **how)

    @line_magic
    @no_var_expand
    @command(_BUDGET)
    def ort_budget(self, args: argparse.Namespace) -> Budget:
        """Choose the recompute plans that cost least time within a number of bytes, and verify them by running.

        ::

            %ort_budget LIMIT [--apply] [--no-verify] [--no-curve] [--lab NAME]
            %ort_budget --saving SHARE [--apply] [--no-verify] [--no-curve] [--lab NAME]

        Arguments:

        - ``LIMIT``: what the peak of a step may be, as ``%ort_memory`` tells it: ``6GiB``, ``900 MiB``, bytes, or
          ``$name``.
        - ``--saving SHARE``: instead, the share of the peak without plans that is to go: ``30%``, ``0.3`` or
          ``$name``.
        - ``--apply``: keep the plans switched on, where the budget is met.
        - ``--no-verify``: predict only; nothing but the step without plans is run.
        - ``--no-curve``: do not predict other budgets as well.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        The last step is profiled and measured without plans, and run again with those that are chosen, three times at
        most. Afterwards, or when it is interrupted, the lab is as it was before, but for plans that are applied.

        Example::

            %ort_budget 6GiB --apply

        The same in Python::

            lab.budget("6 GiB", apply=True)
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        saving = None if args.saving is None else arguments.share(args.saving, variables)
        limit: Any = " ".join(args.limit) or None
        if limit and limit.startswith("$"):
            limit = arguments.variable(limit[1:], variables)
        elif limit and limit.isdigit():
            limit = int(limit)
        return lab.budget(
            limit, saving=saving, apply=args.apply, verify=not args.no_verify, curve=not args.no_curve
        )

    @line_magic
    @no_var_expand
    @command(_HUNT)
    def ort_hunt(self, args: argparse.Namespace) -> BatchHunt:
        """Look for the batch size, and the recompute plans, that train most samples per second under a limit.

        ::

            %ort_hunt MAKE_BATCH --limit LIMIT [--train TRAIN] [--sizes SIZE,SIZE] [--plans PLAN ...] [-n STEPS]
                      [--lab NAME]
            %ort_hunt MAKE_BATCH --resume [--train TRAIN] [--lab NAME]

        Arguments:

        - ``MAKE_BATCH``: name of a function; called with a size, it returns a batch of so many samples.
        - ``--limit LIMIT``: what the peak may reach: ``6GiB``, ``900 MiB``, bytes, or ``$name``. On a CPU that of the
          whole process.
        - ``--train TRAIN``: name of a function that takes one training step with a batch; forward, loss and backward if
          not given.
        - ``--sizes SIZE,SIZE``: batch sizes to try; powers of two from 1 if not given; ``$name`` for a list.
        - ``--plans PLAN ...``: sets of plans to try where a batch does not fit without; ``Gelu+:1:-1``, or several with
          commas between them; ``$name`` for one set or a list of sets; the largest that ORT offers if not given.
        - ``-n STEPS``: timed steps of each run, 3 if not given; a number or ``$name``.
        - ``--resume``: go on with the hunt that was interrupted last.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        A batch that is predicted not to fit is not run; one that runs out of memory all the same is written down, and
        the next one runs. Afterwards, or when it is interrupted, the lab is as it was before.

        Example::

            %ort_hunt make_batch --limit 6GiB --plans Gelu+:1:-1

        The same in Python::

            lab.hunt_batch(make_batch, limit="6 GiB", plans=["Gelu+:1:-1"])
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        how: dict[str, Any] = {}
        if args.train is not None:
            how["train"] = arguments.variable(args.train, variables)
        if args.resume:
            unfinished = [hunt for hunt in lab.hunts if hunt.stopped]
            if not unfinished:
                raise ArgumentError(
                    "There is no hunt to resume.",
                    why="None of this lab was interrupted.",
                    fix="%ort_hunt make_batch --limit 6GiB",
                )
            how["resume"] = unfinished[-1]
        if args.limit is not None:
            limit: Any = " ".join(args.limit)
            held = arguments.variable(limit[1:], variables) if limit.startswith("$") else limit
            how["limit"] = int(limit) if limit.isdigit() else held
        if args.sizes is not None:
            how["sizes"] = arguments.numbers(args.sizes, variables, "--sizes")
        if args.plans is not None:
            how["plans"] = arguments.plan_sets(args.plans, variables)
        if args.n is not None:
            how["steps"] = arguments.number(args.n, variables, "-n")
        return lab.hunt_batch(arguments.variable(args.make_batch, variables), **how)
