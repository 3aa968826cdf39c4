"""The magics about many processes: start and end them, run a cell on all, look at what each has measured, balance."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from IPython.core.magic import Magics, magics_class
from IPython.display import display

from ortlab.errors import ArgumentError
from ortlab.lab.following import show_ranks
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.command import Line, cell, flag, line, takes, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.ranks import Cluster
    from ortlab.ranks.balancing import Balance
    from ortlab.ranks.cluster_records import RankOutput
    from ortlab.ranks.ledgers import Ranks

_ALIVE = "application/vnd.jupyter.widget-view+json"
"""A widget of another process; its text or HTML is shown in its place."""


@magics_class
class ClusterMagics(Magics):
    """Magics over `ortlab.ranks.Cluster`, `Ranks` and `ortlab.ranks.balancing.balance`."""

    shell: InteractiveShell
    _kept: Cluster | None = None

    @line(
        takes("what", "start|stop|status", nargs="?", choices=("start", "stop", "status")),
        whole("-n", "RANKS"),
        whole("--threads", "THREADS"),
        takes("--backend", "gloo|nccl"),
    )
    def ort_cluster(self, args: Line) -> Cluster:
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

        found = latest()
        running = found if found is not None and found.running else None
        what = args.what or ("start" if args.has("n") else "status")
        if what != "start":
            if args.has("n", "threads", "backend"):
                raise ArgumentError(f"{what} takes nothing else.", fix=f"%ort_cluster {what}")
            if found is None:
                raise ArgumentError("No cluster was started yet.", fix="%ort_cluster -n 2")
            if what == "stop":
                found.stop()
            return found
        if not args.has("n"):
            raise ArgumentError("How many ranks is missing.", fix="%ort_cluster -n 2")
        ranks = args.n
        wished = Cluster(ranks, threads=args.threads, backend=args.backend, tell=_tell)
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

    @cell(
        "ort_ranks",
        takes("--on", "RANK,...", read=lambda word, held: arguments.numbers(word, held, "--on")),
        flag("--here"),
    )
    def ort_ranks_cell(self, args: Line, _line: str, cell: str) -> None:
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
        on = args.on
        cluster = _running()
        if args.here:
            self.shell.run_cell(cell).raise_error()
        printer = RankPrinter()
        try:
            cluster.run_cell(cell, on=on, seen=printer.follow)
        finally:
            printer.finish()

    @line(
        whole("number", "RUN", nargs="?"),
        takes("--from", "FOLDER", dest="source", read=arguments.path),
        takes("--lab", "NAME", dest="lab_name"),
    )
    def ort_ranks(self, args: Line) -> Ranks:
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

        found = Ranks.load(args.source) if args.has("source") else _running().gather(args.lab_name)
        if args.has("number"):
            found = found.of(args.number)
        lab = latest()
        if lab is not None:
            show_ranks(lab, found)
        return found

    @line(
        takes("lengths", "LENGTHS", read=arguments.variable),
        whole("--ranks", "RANKS", default="2"),
        whole("--batch", "SIZE", required=True),
        whole("--epochs", "EPOCHS", default="1"),
        flag("--drop-last"),
        takes("--step", "NAME", read=arguments.variable),
    )
    def ort_balance(self, args: Line) -> Balance:
        """Deal samples out to processes, as they come and balanced by length, and compare.

        ::

            %ort_balance LENGTHS --batch SIZE [--ranks RANKS] [--epochs EPOCHS] [--drop-last] [--step NAME]

        Arguments:

        - ``LENGTHS``: variable with the samples, or their lengths.
        - ``--batch SIZE``: samples of a batch of one process.
        - ``--ranks RANKS``: processes that train together, 2 if not given.
        - ``--epochs EPOCHS``: 1 if not given.
        - ``--drop-last``: leave out what does not make a step for all ranks.
        - ``--step NAME``: variable with a function that a process calls with its rank to get its step, a function of
          the indices of a batch. The processes are started, the epochs run and timed, and the processes ended.

        Example::

            %ort_balance lengths --ranks 2 --batch 8 --step make_step

        The same in Python::

            from ortlab.ranks import Cluster
            from ortlab.ranks.balancing import balance, measured

            record = balance(lengths, 8, ranks=2)
            with Cluster(2) as cluster:
                record = measured(record, cluster, make_step)
        """
        from ortlab.ranks import Cluster
        from ortlab.ranks.balancing import balance, measured

        ranks = args.ranks
        record = balance(args.lengths, args.batch, ranks=ranks, epochs=args.epochs, drop_last=args.drop_last)
        if not args.has("step"):
            return record
        make_step = args.step
        with Cluster(ranks) as cluster:
            return measured(record, cluster, make_step)


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
    for said in text.splitlines():
        print(f"[{rank}] {said}", file=stream)
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
