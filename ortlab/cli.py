"""The command line: `ortlab demo`, `ortlab lab`, `ortlab doctor`, `ortlab selftest`, `ortlab build`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import ortlab
from ortlab.errors import OrtlabError
from ortlab.runs.interrupts import interrupts_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.resources.abc import Traversable

QUICKSTART = "01_quickstart.ipynb"

FAILED = 1
"""Exit code when ortlab could not do what it was asked, or the doctor found a fault."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: `argv` are its arguments without the program's name, those of the process if None.

    Returns the exit code: 0 done, 1 not possible (the reason is on standard error), 130 interrupted. Raises SystemExit
    with code 2 if the arguments are wrong, with 0 for ``--help`` and ``--version``.
    """
    parser = _parser()
    args, others = parser.parse_known_args(argv)
    if others and args.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    args.others = others
    try:
        with interrupts_kept():
            code: int = args.action(args)
    except OrtlabError as error:
        print(f"ortlab {args.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"\nortlab {args.command}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, `head` for instance, has had enough. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ortlab",
        description="ONNX Runtime Training in a notebook: which switches exist, and what they do.",
    )
    parser.add_argument("--version", action="version", version=f"ortlab {ortlab.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train a small BERT, take 30 %% off the memory that a step needs, and say what that costs",
        description="Train a small BERT on the English text that ships with Python on ONNX Runtime, take 30 %% off the"
        " memory that a step needs, and compare its time and memory with PyTorch's, from the same start.",
    )
    for name, kind, default, what in (
        ("steps", _between(1, 1_000_000), 15, "training steps of the first run"),
        ("layers", _between(1, 1_000_000), 4, "transformer layers"),
        ("hidden", _hidden, 256, "hidden size, a multiple of 64"),
        ("batch", _between(1, 1_000_000), 8, "sequences in a batch"),
        ("length", _between(8, 512), 128, "tokens in a sequence, 8 to 512"),
        # Seeds 0 and 1 start the same stream of dropout masks in ONNX Runtime on the CPU.
        ("seed", _between(2, 2**31 - 1), 2024, "seed of weights and batches, 2 or more"),
    ):
        demo.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: %(default)s)")
    demo.add_argument("--save", type=Path, metavar="FILE", help="write the runs to this JSON file")
    demo.set_defaults(action=_demo)

    lab = commands.add_parser(
        "lab",
        help="open JupyterLab on the quickstart",
        description="Put the quickstart notebook into the folder, unless it is there already, and open"
        " JupyterLab on it. Every other argument goes to JupyterLab: ortlab lab --no-browser --port 8889.",
    )
    lab.add_argument(
        "--folder", type=Path, default=Path(), help="where the notebook goes (default: this folder)"
    )
    lab.set_defaults(action=_lab)

    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, what fits, and which command repairs what does not",
        description="Say what is installed, what fits, and which command repairs what does not."
        " The exit code is 0 if models can be trained, 1 if not.",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(action=_doctor)

    test = commands.add_parser(
        "selftest",
        help="try models, switches, optimizers, memory and the largest batch that fits; under ten minutes",
        description="Try what ortlab promises on this machine, in under ten minutes, and write selftest.json and the"
        " readable selftest.txt. What is not tried is named with the reason. The exit code is 0 if all that was tried"
        " holds, 1 if not, 130 after Ctrl-C, which keeps what was found.",
    )
    test.add_argument("--gpu", action="store_true", help="train on the first GPU instead of the CPU")
    test.add_argument("--tiny", action="store_true", help="as little as shows that it runs")
    test.add_argument("--only", nargs="+", metavar="PART", help="parts to run (default: all)")
    test.add_argument(
        "--minutes", type=float, default=10.0, help="what all of it may take (default: %(default)g)"
    )
    test.add_argument(
        "--output",
        type=Path,
        default=Path("ortlab-selftest"),
        help="folder of the files (default: %(default)s)",
    )
    test.set_defaults(action=_selftest)

    build = commands.add_parser(
        "build",
        help="compile ahead what makes small models quicker, and what runs autograd Functions",
        description="Compile, into the user's cache, two small C++ libraries: the calls of PyTorch's operators"
        " from a step, which the first `ortlab.wrap` compiles if there is a compiler, and what lets ONNX Runtime"
        " run a model's own autograd Functions, without which x86-64 Linux and macOS do. A C++ compiler is"
        " needed, torch's headers are not.",
    )
    build.set_defaults(action=_build)
    return parser


def _demo(args: argparse.Namespace) -> int:
    if args.save is not None:
        _check_writable(args.save)  # now, not after a minute of training
    from ortlab.checks import demo

    setting = demo.Setting(args.steps, args.layers, args.hidden, args.batch, args.length, args.seed)
    runs = demo.main(setting)
    if args.save is not None:
        runs.save(args.save)
        print(f"\nThe runs are in {args.save}; ortlab.load reads them.")
    return 0


def _check_writable(path: Path) -> None:
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise OrtlabError(f"{path} cannot be written.", why=str(error), fix="Give another --save.") from error


def _lab(args: argparse.Namespace) -> int:
    notebook = place_quickstart(args.folder)
    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(argv=[str(notebook), *args.others])
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from ortlab.checks import doctor as examination

    report = examination.doctor()
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        from ortlab.render import text

        print(text.render(report))
    return 0 if report.ok else FAILED


def _selftest(args: argparse.Namespace) -> int:
    _check_folder(args.output)  # now, not after ten minutes
    from tqdm import tqdm

    from ortlab.checks import selftest
    from ortlab.render.check_pages import selftest_verdict

    with tqdm(bar_format="{desc}", leave=False, disable=None) as line:  # on a terminal only

        def show(words: str) -> None:
            tqdm.write(words)
            sys.stdout.flush()

        test = selftest.run_selftest(
            gpu=args.gpu,
            tiny=args.tiny,
            only=args.only or selftest.NAMES,
            show=show,
            tick=lambda trial, seconds: line.set_description_str(f"  trying: {trial} ({seconds:.0f} s)"),
            keep=lambda found: selftest.write(found, args.output),
            limit_s=60 * args.minutes,
        )
    data, report = selftest.write(test, args.output)
    print(f"\n{selftest_verdict(test)}")
    for one in test.findings:
        if one.outcome in {"failed", "did not hold"}:
            print(f"  {one.outcome:<12}  {one.part}, {one.name}: {one.said}")
    print(f"Report: {report}\nRecord: {data} (ortlab.records.checks.SelfTest.load reads it)")
    if test.interrupted:
        return INTERRUPTED
    return 0 if test.ok else FAILED


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OrtlabError(
            f"{folder} cannot be written.", why=str(error), fix="Give another --output."
        ) from error


def _build(_: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ortlab.engine import extensions

    with tqdm(total=100, unit="%", bar_format="{desc:<24}{bar}{percentage:4.0f} %", leave=False) as bar:

        def progress(stage: str, done: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update(round(100 * done) - bar.n)

        library = extensions.build(progress)
    print(f"Compiled: {library}")
    return 0


def place_quickstart(folder: Path) -> Path:
    """Copy the quickstart notebook into a folder, unless one of that name is there; never overwrite it.

    The folder is made if it does not exist. Raises OrtlabError if it cannot be written, or the installation lacks the
    notebook.
    """
    target = folder / QUICKSTART
    try:
        content = _shipped_quickstart().read_bytes()
    except OSError as error:
        raise OrtlabError(
            "The quickstart notebook is missing from this installation of ortlab.",
            why=str(error),
            fix="Install ortlab again.",
        ) from error
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(content)
    except OSError as error:
        raise OrtlabError(
            f"The quickstart notebook cannot be written to {folder.resolve()}.",
            why=str(error),
            fix="Choose a folder of yours: ortlab lab --folder DIRECTORY",
        ) from error
    return target


def _shipped_quickstart() -> Traversable:
    """Find the notebook: in the wheel, inside the package; in a checkout, beside it."""
    package = resources.files("ortlab")
    shipped = package / "notebooks" / QUICKSTART
    return shipped if shipped.is_file() else Path(str(package)).parent / "notebooks" / QUICKSTART


def _between(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            message = f"{text!r} is not a whole number from {low} to {high}"
            raise argparse.ArgumentTypeError(message)
        return value

    return read


def _hidden(text: str) -> int:
    value = _between(64, 4096)(text)
    if value % 64:
        message = f"{value} is not a multiple of 64, the size of an attention head"
        raise argparse.ArgumentTypeError(message)
    return value


if __name__ == "__main__":
    sys.exit(main())
