"""The magics about many processes: start and end them, run a cell on all, and look at what each has measured."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, TextIO

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.display import display

from ortlab.errors import ArgumentError
from ortlab.lab.following import show_ranks
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.command import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.ranks import Cluster
    from ortlab.ranks.cluster_records import RankOutput
    from ortlab.ranks.ledgers import Ranks

_ALIVE = "application/vnd.jupyter.widget-view+json"
"""A widget of another process; its text or HTML is shown in its place."""

_CLUSTER = Parser("%ort_cluster")
_CLUSTER.add_argument("what", nargs="?", choices=("start", "stop", "status"), metavar="start|stop|status")
_CLUSTER.add_argument("-n", metavar="RANKS")
_CLUSTER.add_argument("--threads", metavar="THREADS")
_CLUSTER.add_argument("--backend", metavar="gloo|nccl")

_CELL = Parser("%%ort_ranks")
_CELL.add_argument("--on", metavar="RANK,...")
_CELL.add_argument("--here", action="store_true")

_RANKS = Parser("%ort_ranks")
_RANKS.add_argument("number", nargs="?", metavar="RUN")
_RANKS.add_argument("--from", dest="source", metavar="FOLDER")
_RANKS.add_argument("--lab", metavar="NAME")


@magics_class
class ClusterMagics(Magics):
    """Magics over `ortlab.ranks.Cluster` and `Ranks`."""

    shell: InteractiveShell
    _kept: Cluster | None = None

    @line_magic
    @no_var_expand
    @command(_CLUSTER)
    def ort_cluster(self, args: argparse.Namespace) -> Cluster:
        """Start processes that train together, say how they stand, or end them.

        ::

            %ort_cluster [start] -n RANKS [--threads THREADS] [--backend gloo|nccl]
            %ort_cluster [status]
            %ort_cluster stop

        Arguments:

        - ``-n RANKS``: how many processes; each is a rank of one ``torch.distributed`` group.
        - ``--threads THREADS``: threads of each; the machine's cores, divided among them, if not given.
        - ``--backend``: ``nccl`` where there is a GPU for each rank, ``gloo`` otherwise, if not given.
        - ``stop``: end them. They end with the notebook's kernel, too.

        Example::

            cluster = %ort_cluster -n 2

        The same in Python::

            from ortlab.ranks import Cluster

            cluster = Cluster(2).start()
        """
        from ortlab.ranks import Cluster, latest

        variables = self.shell.user_ns
        found = latest()
        running = found if found is not None and found.running else None
        what = args.what or ("status" if args.n is None else "start")
        if what != "start":
            if args.n is not None or args.threads is not None or args.backend is not None:
                raise ArgumentError(f"{what} takes nothing else.", fix=f"%ort_cluster {what}")
            if found is None:
                raise ArgumentError("No cluster was started yet.", fix="%ort_cluster -n 2")
            if what == "stop":
                found.stop()
            return found
        if args.n is None:
            raise ArgumentError("How many ranks is missing.", fix="%ort_cluster -n 2")
        ranks = arguments.number(args.n, variables, "-n")
        threads = None if args.threads is None else arguments.number(args.threads, variables, "--threads")
        wished = Cluster(ranks, threads=threads, backend=args.backend, tell=_tell)
        if running is not None:
            if (running.ranks, running.threads, running.backend) == (ranks, wished.threads, wished.backend):
                print(f"The cluster of {ranks} ranks runs already; it is the same one.")  # noqa: T201
                return running
            raise ArgumentError(
                f"A cluster of {running.ranks} ranks runs already.",
                why="Its ranks hold models and take memory, so it is not ended unasked.",
                fix="%ort_cluster stop, then start the other.",
            )
        self._kept = wished  # as long as the shell lives, whether the user keeps it or not
        return wished.start()

    @cell_magic("ort_ranks")  # type: ignore[arg-type] # its annotation has no way to say what a name returns
    @no_var_expand
    @command(_CELL)
    def ort_ranks_cell(self, args: argparse.Namespace, _line: str, cell: str) -> None:
        """Run the cell on every rank of the cluster at the same time; its variables stay there.

        ::

            %%ort_ranks [--on RANK,...] [--here]
            (the cell)

        Arguments:

        - ``--on RANK,...``: only on these ranks; what needs all of them, such as a step under
          DistributedDataParallel, would wait forever, until you interrupt.
        - ``--here``: in this notebook, too, before the ranks run it.

        The magics of ortlab are loaded on each rank: the cell may hold ``%ort_wrap``, or be a ``%%ort_step``. What the
        first rank prints is shown as it comes; what all printed and displayed stands rank by rank at the end. If a
        rank fails, or you interrupt, the others come back, too, and keep their variables. If a rank dies, that is
        said, and the others are ended.

        Example::

            %%ort_ranks
            lab = %ort_wrap model
            ddp = torch.nn.parallel.DistributedDataParallel(model)

        The same in Python::

            outputs = cluster.run_cell(source)
        """
        on = None if args.on is None else arguments.numbers(args.on, self.shell.user_ns, "--on")
        cluster = _running()
        if args.here:
            self.shell.run_cell(cell).raise_error()
        printer = RankPrinter()
        try:
            cluster.run_cell(cell, on=on, seen=printer.follow)
        finally:
            printer.finish()

    @line_magic
    @no_var_expand
    @command(_RANKS)
    def ort_ranks(self, args: argparse.Namespace) -> Ranks:
        """Bring together what each rank has measured: time, exchange of gradients, memory, tokens.

        ::

            %ort_ranks [RUN] [--from FOLDER] [--lab NAME]

        Arguments:

        - ``RUN``: number of the run; the last that all ranks have if not given.
        - ``--from FOLDER``: the ledgers that ``ortlab.ranks.save_rank(lab.runs, FOLDER)`` has written on each rank,
          here or elsewhere, in place of the cluster's.
        - ``--lab NAME``: variable of the lab on the ranks; the one wrapped last if not given.

        A lab in this notebook shows them in its panel, too.

        Example::

            ranks = %ort_ranks

        The same in Python::

            ranks = cluster.gather()
            ranks = ortlab.load(folder)  # --from
        """
        from ortlab.lab.lab import latest
        from ortlab.ranks.ledgers import Ranks

        variables = self.shell.user_ns
        if args.source is not None:
            found = Ranks.load(arguments.path(args.source, variables))
        else:
            found = _running().gather(args.lab)
        if args.number is not None:
            found = found.of(arguments.number(args.number, variables, "RUN"))
        lab = latest()
        if lab is not None:
            show_ranks(lab, found)
        return found


def _running() -> Cluster:
    """Return the cluster that was started last; one that has died says so itself when it is used."""
    from ortlab.ranks import latest

    found = latest()
    if found is None:
        raise ArgumentError("No cluster runs.", fix="%ort_cluster -n 2")
    return found


def _tell(words: str) -> None:
    print(words, file=sys.stderr)  # noqa: T201 - nobody has asked, so nothing can be raised


class RankPrinter:
    """Shows the outputs of one cell; each line begins with the number of its rank."""

    def __init__(self) -> None:
        self._outputs: Sequence[RankOutput] = ()
        self._printed = 0

    def follow(self, outputs: Sequence[RankOutput]) -> None:
        """Print what the first rank has printed since the last call, whole lines only."""
        self._outputs = outputs
        if not outputs:
            return
        first = outputs[0]
        end = first.stdout.rfind("\n") + 1
        if end > self._printed:
            _write(first.rank, first.stdout[self._printed : end], sys.stdout)
            self._printed = end

    def finish(self) -> None:
        """Show the rest, rank by rank; of several errors, only the traceback of one."""
        for number, one in enumerate(self._outputs):
            _write(one.rank, one.stdout[self._printed if number == 0 else 0 :], sys.stdout)
            _write(one.rank, one.stderr, sys.stderr)
            for data in one.displays:
                shown = {mime: form for mime, form in data.items() if mime != _ALIVE}
                _show(one.rank, shown, is_open=number == 0)
        failed = [one for one in self._outputs if one.error is not None]
        # A rank that was only interrupted, or lost its connection, says less than the one that was first.
        first = min(failed, key=lambda one: one.is_consequence, default=None)
        if first is not None and first.error is not None:
            _write(first.rank, first.error.traceback, sys.stderr)


def _write(rank: int, text: str, stream: TextIO) -> None:
    for line in text.splitlines():
        print(f"[{rank}] {line}", file=stream)
    stream.flush()


def _show(rank: int, data: dict[str, Any], *, is_open: bool) -> None:
    """Show a value; the HTML of the first rank is unfolded, and that of the others folded."""
    plain = str(data.get("text/plain", ""))
    if set(data) <= {"text/plain"}:
        _write(rank, plain, sys.stdout)
        return
    head = f"rank {rank}"
    page = data.get("text/html")
    if page is None:
        display({"text/plain": head, "text/html": f"<strong>{head}</strong>"}, raw=True)
        display(data, raw=True)
        return
    opened = " open" if is_open else ""
    folded = f"<details{opened}><summary><strong>{head}</strong></summary>{page}</details>"
    display({"text/plain": f"{head}\n{plain}", "text/html": folded}, raw=True)
