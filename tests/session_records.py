"""One small and one large record of every kind that has a page, all of real sessions on a CPU."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import small_transformers
import torch
import triton_files
from torch import nn

import ortlab
from ortlab.memory.device_snapshot import KeptBuffer, MemorySnapshot, name_blocks
from ortlab.memory.saved_plans import read_saved
from ortlab.options.catalogue import OptionList
from ortlab.options.options import Options
from ortlab.ranks import Cluster
from ortlab.ranks.balancing import balance
from ortlab.ranks.cluster_records import rank_status
from ortlab.ranks.ledgers import RankLedger, Ranks
from ortlab.records.checks import Finding, SelfTest
from ortlab.records.comparison import compare
from ortlab.records.runs import Ledger, Run
from ortlab.records.tuning_results import read_tuning_results
from ortlab.studies.sweep import Sweep

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab

MANY = 300
"""How often the rows of a record are repeated to make a large one: more than any table shows."""

NAME = "a name of a thousand characters " * 32


class Doubled(torch.autograd.Function):
    """Twice its input."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Net(nn.Module):
    """Layers with a Gelu each, an embedding with padding before them and a Function behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(self.layers(self.words(tokens))).square().mean()


def _tokens(size: int = 4) -> torch.Tensor:
    tokens = torch.arange(size * 8).reshape(size, 8) % 50
    return tokens.where(torch.arange(8) < 6, 0)


def net_lab() -> Lab:
    """Wrap a small model that has run four steps, and four more with another switch."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        loss = model(_tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, name="net")
    lab.step(step, n=4)
    lab.set(memory_level=1).rerun()
    lab.set(memory_level=0).rerun()
    return lab


def deep_lab() -> Lab:
    """Wrap a BERT of 12 narrow layers: more operators, activations and plans than a table shows."""
    torch.manual_seed(3)
    sizes = {"layers": 12, "width": 16, "words": 50, "max_position_embeddings": 16}
    model = small_transformers.bert("ForSequenceClassification", **sizes, drop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, labels = _tokens(2), torch.tensor([0, 1])

    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, name=NAME)
    lab.step(step, n=2)
    return lab


def grown(record: Any, times: int = MANY, **changes: Any) -> Any:
    """Repeat whatever a record has rows of, unless `changes` says something else."""
    rows = {
        field.name: getattr(record, field.name) * times
        for field in dataclasses.fields(record)
        if field.name not in changes and isinstance(getattr(record, field.name), (tuple, list))
    }
    return replace(record, **rows, **changes)


def _many_runs(run: Run) -> list[Run]:
    return [replace(run, number=number) for number in range(1, MANY)]


def _ranks(run: Run, count: int) -> Ranks:
    return Ranks(tuple(RankLedger(rank, count, "here", 7, "gloo", (run,)) for rank in range(count)))


def _snapshot(lab: Lab, kept: int) -> MemorySnapshot:
    blocks = name_blocks(
        {"segments": [], "device_traces": [[]]}, 0, [KeptBuffer(NAME, 1024, 1, 1)] * kept, {}
    )
    return MemorySnapshot(blocks, "cuda:0", "ort", lab.options.to_dict())


def _tuning(folder: Path, count: int) -> Any:
    folder.mkdir()
    choices = {f"Gemm{number}TunableOp": {"TN_128_512_64": 3} for number in range(count)}
    content = [{"ep": "CUDAExecutionProvider", "results": choices, "validators": {"ORT_VERSION": "1.19.2"}}]
    (folder / "tuning_results_training.json").write_text(json.dumps(content), encoding="utf-8")
    return read_tuning_results(folder)


def _selftest(count: int) -> SelfTest:
    finding = Finding("models", NAME if count > 1 else "BERT", "held", "differs by 1e-7", 1e-7, 1e-5)
    return SelfTest(
        "cpu", {"torch": "2.13.0"}, "2026-01-01T00:00:00+00:00", {"models": 3.5}, (finding,) * count
    )


def _kernels(lab: Lab, folder: Path, monkeypatch: Any) -> Any:
    graph = lab.graph("gradient").model
    monkeypatch.chdir(folder)
    known = triton_files.generator().get_supported_ops()
    name = next(node.name for node in graph.graph.node if node.op_type in known)
    triton_files.write(triton_files.cut(graph, [name]), lab.activations().symbols, monkeypatch)
    return lab.triton_kernels()


def _of_runs(lab: Lab) -> dict[type, tuple[object, object]]:
    run = lab.runs[0]
    many = _many_runs(run)
    sweep = lab.sweep({"memory_level": [0, 1]}, n=4, progress=False)
    points = [replace(point, number=number) for number, point in enumerate(sweep.points * 20)]
    large = Sweep(1, NAME, points, baseline=0, count=4, rounds=1, start_digest=sweep.start_digest)
    candidates = lab.compare_engines(4, engines=("eager",), budgets=(), memory=False, progress=False)
    options = Options(memory_plan=tuple(f"Op{number}+:1:-1" for number in range(MANY)))
    search = lab.find_batch_size(_tokens, "64 GiB", sizes=[1, 2], plans=(), n=3, progress=False)
    bisection = lab.bisect("loss", changes={"memory_level": 1}, progress=False)
    budget = lab.budget("64 GiB", curve=False, verify=False, progress=False)
    parity = lab.parity(1, progress=False)
    pairs = [
        (run, replace(run, steps=run.steps * MANY, options=options)),
        (lab.runs, Ledger(many)),
        (compare(lab.runs[:2]), compare(many[:40])),
        (sweep, large),
        (candidates, replace(candidates, sweep=large)),
        (bisection, grown(bisection)),
        (search, grown(search, 20, sizes=None, plan_sets=None)),
        (budget, replace(budget, model=NAME, asked=NAME)),
        (parity, grown(parity, 30, losses=parity.losses)),
        (_ranks(run, 2), _ranks(run, MANY)),
        (run.memory_phases, grown(run.memory_phases)),
        (Options(), options),
        (OptionList(Options(), ("memory_level",)), OptionList(options)),
        (lab.status, replace(lab.status, state="fallback", reason=NAME)),
    ]
    return {type(small): (small, large) for small, large in pairs}


def _of_graphs(lab: Lab, deep: Lab, folder: Path, monkeypatch: Any) -> dict[type, tuple[object, object]]:
    found = {}
    for one in (lab, deep):
        one.set(memory_level=0).rerun(n=1)
        graph = one.graph()
        plan = one.plan()
        with_plan = plan.rows[0].config
        one.set(memory_plan=(with_plan,)).rerun(n=1)
        saved = one.plan().save(folder / f"{len(found)}.json")
        one.set(memory_plan=()).rerun(n=1)
        file = ortlab.open_graph(graph.save(folder / f"{len(found)}.onnx"))
        found[one] = [
            graph,
            one.graphs(),
            file,
            ortlab.embed_graph(graph),
            one.graph_diff(memory_level=1),
            plan,
            read_saved(saved),
            one.activations(),
            one.profile(),
            one.flops(),
            one,
        ]
    pairs = list(zip(found[lab], found[deep], strict=True))
    kernels = _kernels(lab, folder, monkeypatch)
    kernel = kernels.kernel(1)
    saved = lab.flops(baseline={"compute_optimizer": False})
    measured = lab.memory(n=1)
    pairs += [(kernels, grown(kernels)), (kernel, replace(kernel, nodes=kernel.nodes * MANY))]
    pairs += [
        (saved, replace(saved, without=grown(saved.without), having=found[deep][-2])),
        (measured, grown(measured)),
    ]
    return {type(small): (small, large) for small, large in pairs}


def _of_models(lab: Lab, folder: Path) -> dict[type, tuple[object, object]]:
    preflight = ortlab.preflight(Net(), _tokens())
    functions = ortlab.parity.check_functions(Net(), _tokens())
    density = lab.density((_tokens(),))
    report = ortlab.doctor()
    even, uneven = (
        balance([3, 9, 4, 8] * 4, 2, ranks=2),
        balance(list(range(1, 2 * MANY)), 1, ranks=40, epochs=3),
    )
    recipe = ortlab.recipe("fused_adam")
    messages = lab.messages
    cluster = Cluster(2)
    alive = replace(cluster.status(), ranks=MANY, running=(rank_status(0, os.getpid()),) * MANY)
    pairs = [
        (preflight, grown(preflight, model=NAME)),
        (functions, grown(functions)),
        (density, grown(density, density=replace(density.density, rows=density.density.rows * MANY))),
        (report, grown(report, 10)),
        (even, uneven),
        (recipe, replace(recipe, code=recipe.code * MANY, missing=(NAME,) * 9)),
        (messages, type(messages)(tuple(messages) * MANY)),
        (cluster, Cluster(40)),
        (cluster.status(), alive),
        (_selftest(1), _selftest(MANY)),
        (_tuning(folder / "one", 1), _tuning(folder / "many", MANY)),
        (_snapshot(lab, 1), _snapshot(lab, MANY)),
    ]
    return {type(small): (small, large) for small, large in pairs}


def session_records(lab: Lab, deep: Lab, folder: Path, monkeypatch: Any) -> dict[type, tuple[object, object]]:
    """Make them: by type, a small one and one with more rows than any table shows."""
    return {
        **_of_runs(lab),
        **_of_models(lab, folder),
        **_of_graphs(lab, deep, folder, monkeypatch),
    }
