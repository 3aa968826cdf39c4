"""Damaged files of everything that ortlab reads as JSON: each is read, and can be shown, or is refused in its words."""

from __future__ import annotations

import copy
import functools
import json
import random
import resource
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ortlab
from ortlab.errors import OrtlabError
from ortlab.memory import read_saved
from ortlab.options.option_files import with_files
from ortlab.ranks.balancing import balance
from ortlab.ranks.ledgers import rank_ledger
from ortlab.records import record_files
from ortlab.records.checks import Finding, SelfTest
from ortlab.records.tuning_results import read_tuning_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMED = {"file": "The file of options", "other": "The file is none of options.", "fix": "Give another."}
JUNK = (
    *(
        None,
        3,
        -1,
        0,
        "x",
        "",
        [],
        {},
        [1],
        {"a": 1},
        True,
        float("inf"),
        float("nan"),
        10**30,
        1.5,
        [[[]]],
        [None],
    ),
    *("\x00\x1b", ["a", "b"], "2026-01-01", -1e300, 10**400, "1", {"": {"": []}}, [{}], "\ud800"),
)
ALL = 1000
"""Mutations with the usual number of rounds."""
ROUNDS = 20
MOST_BYTES = 6 << 30


def main_record(path: Path) -> object:
    """Read a record as users do, and show it."""
    return shown(ortlab.load(path))


def shown(record: Any) -> object:
    """Show a record in every form."""
    table = getattr(record, "table", None)
    return repr(record), str(record), record._repr_mimebundle_(), table and table()


def from_variable(name: str) -> Callable[[Path], object]:
    """Return what reads a file that a variable of ORTModule names."""
    return lambda path: str(ortlab.Options.from_environment({name: str(path)}))


RECORDS = (
    *(
        "ledger",
        "run",
        "sweep",
        "budget",
        "bisection",
        "search",
        "candidates",
        "comparison of tensors",
        "memory plan",
    ),
    *(
        "difference of graphs",
        "FLOPs",
        "saved FLOPs",
        "densities",
        "load balance",
        "self-test",
        "ledger of a rank",
    ),
)
READERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(RECORDS, main_record),
    "options": lambda path: str(ortlab.Options.from_dict(record_files.read(path, dict, **NAMED))),
    "ORTModule's configuration": from_variable("ORTMODULE_JSON_CONFIG_PATH"),
    "file of plans": from_variable("ORTMODULE_MEMORY_OPT_CONFIG"),
    "plans that were kept": lambda path: shown(read_saved(path)),
    "Triton's configuration": lambda path: with_files(ortlab.Options(triton_config_file=str(path)), ()),
    "results of tuning": lambda path: shown(read_tuning_results(path.parent)),
}
CASES, QUICK = tuple(READERS), ("ledger", "run", "options", "results of tuning")


def count(case: str, rounds: int) -> dict[str, Any]:
    """Damage a record in many ways, read each, and count what neither succeeds nor is an error of ortlab's."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.RLIM_INFINITY))  # what has no end, fails
    whole = ALL * rounds // ROUNDS
    place = CASES.index(case)
    tried = whole // len(CASES) + (place < whole % len(CASES))
    draw, raw, read = random.Random(case), dict[str, str](), 0
    content = written(case)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuning_results_training.json"  # the name that ONNX Runtime gives one of them
        file.write_text(json.dumps(content), encoding="utf-8")
        READERS[case](file)  # undamaged, it is read
        for number in range(tried):
            data = damaged(content, draw)
            file.write_bytes(data)
            try:
                READERS[case](file)
                read += 1
            except OrtlabError:
                continue
            except Exception as error:  # noqa: BLE001 - it is the result
                raw[f"{number}: {type(error).__name__}: {str(error)[:150]}"] = ""
    row = {"case": case, "tried": tried, "read": read, "refused": tried - read - len(raw)}
    return row | {"violations": len(raw), "which": list(raw)[:5]}


# ---- damage -------------------------------------------------------------------------------------------------------


def damaged(content: Any, draw: random.Random) -> bytes:
    """Return the bytes of a file in which one thing is wrong."""
    kind = draw.random()
    if kind < 0.9:  # noqa: PLR2004 - most are JSON
        return json.dumps(mutated(content, draw)).encode()
    text = json.dumps(content).encode()
    at = draw.randrange(len(text))
    return draw.choice(
        (
            text[:at],
            text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :],
            b"[" * 100_000,
            b'{"a":' * 100_000,
            json.dumps(draw.choice(JUNK)).encode(),
            b"\xff\xfe" + text,
        )
    )


def mutated(content: Any, draw: random.Random) -> Any:
    """Change, drop, add or double one entry of a JSON value."""
    content = copy.deepcopy(content)
    paths = [path for path in places(content) if path]
    if not paths:
        return draw.choice(JUNK)
    *path, last = draw.choice(paths)
    holder = functools.reduce(lambda inner, key: inner[key], path, content)
    kind = draw.random()
    if kind < 0.5:  # noqa: PLR2004
        holder[last] = draw.choice(JUNK)
    elif kind < 0.65:  # noqa: PLR2004
        del holder[last]
    elif kind < 0.8:  # noqa: PLR2004 - what stands elsewhere
        other = functools.reduce(lambda inner, key: inner[key], draw.choice(paths), content)
        holder[last] = copy.deepcopy(other)
    elif isinstance(holder, dict):
        holder[draw.choice(("extra", "rank", "schema", "number", "record"))] = draw.choice(JUNK)
    else:
        holder.append(copy.deepcopy(draw.choice((*JUNK, holder[last]))))
    return content


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each entry of a JSON value; of long lists of numbers some."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


# ---- what is damaged ----------------------------------------------------------------------------------------------


@functools.cache
def lab_with_runs() -> Any:
    """Make a lab of a small model with a step."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 50)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(50, (4, 8))
    tokens[:, 6:] = 0

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(step, n=2)
    return lab


def written(case: str) -> Any:
    """Return a record as JSON has it."""
    made = MADE[case]()
    return json.loads(json.dumps(record_files.plain(made) if hasattr(made, "to_dict") else made))


MADE: dict[str, Callable[[], Any]] = {
    "ledger": lambda: [run.to_dict() for run in lab_with_runs().runs],
    "run": lambda: lab_with_runs().runs[0],
    "sweep": lambda: lab_with_runs().sweep({"memory_level": [0, 1], "engine": ["ort", "eager"]}, n=1),
    "budget": lambda: lab_with_runs().budget("90%", apply=False),
    "bisection": lambda: lab_with_runs().bisect(
        "loss", changes={"memory_level": 1, "aten_backward": False}, n=1
    ),
    "search": lambda: lab_with_runs().find_batch_size(
        lambda size: torch.ones(size, 8, dtype=torch.long), "400 MiB", train=_train, sizes=[2, 4], n=1
    ),
    "candidates": lambda: lab_with_runs().compare_engines(engines=("eager",)),
    "comparison of tensors": lambda: lab_with_runs().parity(1, seeds=False),
    "memory plan": lambda: lab_with_runs().plan(),
    "difference of graphs": lambda: lab_with_runs().graph_diff(memory_level=1),
    "FLOPs": lambda: lab_with_runs().flops(),
    "saved FLOPs": lambda: lab_with_runs().flops(baseline={"label_sparse_optimizer": False}),
    "densities": lambda: lab_with_runs().density(torch.tensor([[1, 2, 0], [3, 0, 0]])),
    "load balance": lambda: balance([3, 9, 4, 8] * 4, 2, ranks=2),
    "self-test": lambda: SelfTest(
        "cpu",
        {"torch": "2.13"},
        "2026-01-01T00:00:00+00:00",
        {"models": 3.5},
        (Finding("models", "BERT", "held", "differs by 1e-7", 1e-7, 1e-5),),
    ),
    "ledger of a rank": lambda: rank_ledger(lab_with_runs().runs),
    "options": lambda: ortlab.Options(memory_plan=("Gelu+:1:-1",), log_level="INFO").to_dict(),
    "ORTModule's configuration": lambda: {
        "PropagateCastOps": {"Strategy": "FLOOD_FILL", "Level": 1, "Allow": ["ABC"]},
        "UseStaticShape": True,
        "SkipCheck": ["SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT"],
        "DebugOptions": {"LogLevel": "INFO", "SaveONNX": False, "ONNXPrefix": "model"},
        "FallbackPolicy": ["FALLBACK_UNSUPPORTED_DEVICE"],
        "OnnxOpsetVersion": 15,
    },
    "file of plans": lambda: ["Gelu+:1:-1", "Cast+:1:-1"],
    "plans that were kept": lambda: ["Gelu+:1:-1", "Cast+:1:-1"],
    "Triton's configuration": lambda: {
        "ops": {
            "Add": {"versions": [13, 14], "conditions": {"axis": "-1", "axes": "[-1]"}, "is_no_op": False}
        },
        "initializer": "scalar",
        "min_nodes": 2,
        "symbolic_shape_hint": {"*": 128},
    },
    "results of tuning": lambda: [
        {
            "ep": "ROCMExecutionProvider",
            "results": {"GemmTunableOp": {"NN_1_2_3": 4}},
            "validators": {"ORT_VERSION": "1.19.2"},
        }
    ],
}


def _train(batch: torch.Tensor) -> None:
    lab_with_runs().module(batch).float().sum().backward()
