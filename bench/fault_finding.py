"""Of 100 faults of a relative 1e-3, parity names the exact module of at least 95; 50 clean pairs give no alarm.

A fault is one operator of a known module whose result, or whose gradient, is multiplied by 1.001: in ONNX Runtime's
gradient graph, or in the module of the eager peer. Operators are drawn at random among those that compute something (no
reshapes) and through which a gradient flows, in five families of transformers. A clean pair has other weights and
another batch each time.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from report import Report, arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 1.001
FAMILIES = ("BERT", "GPT-2", "Llama", "T5", "ViT")
CLEAN = "clean"
SIDES = ("ort forward", "ort backward", "eager forward", "eager backward")
COMPUTING = frozenset(
    """linear matmul mul __mul__ __rmul__ add __add__ __radd__ sub __sub__ truediv __truediv__ softmax layer_norm
    rms_norm gelu silu relu tanh sigmoid pow __pow__ mean rsqrt embedding conv2d scaled_dot_product_attention addmm
    baddbmm""".split()  # noqa: SIM905
)
IN_GRAPH = frozenset(
    """MatMul FusedMatMul Gemm Mul Add Sub Div Softmax LayerNormalization SimplifiedLayerNormalization Gelu FastGelu
    QuickGelu Relu Tanh Sigmoid Pow Sqrt ReduceMean Reciprocal Conv ATen SoftmaxGrad LayerNormalizationGrad GeluGrad
    BiasGelu Sum""".split()  # noqa: SIM905
)


def main() -> None:
    """Inject, compare, count and write."""
    read = arguments(__doc__, rounds=5)
    report = Report("fault_finding", read)
    families, each, clean = (FAMILIES[:1], 1, 1) if read.quick else (FAMILIES, read.rounds, 2 * read.rounds)
    tasks = [
        (family, side, number)
        for number in range(clean)
        for side in (*SIDES, CLEAN)
        for family in families
        if side == CLEAN or number < each
    ]
    rows = {family: dict.fromkeys((*SIDES, CLEAN), 0) for family in families}
    wrong = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=_prepare, max_tasks_per_child=20) as pool:
        running = {pool.submit(outcome, *task): task for task in tasks}
        for done, future in enumerate(as_completed(running), start=1):
            family, side, number = running[future]
            found = future.result()
            rows[family][side] += not found
            if found:
                wrong.append({"case": f"{family}, {side} {number}", **found})
            print(f"{done} of {len(tasks)}: {family}, {side} {number}", found, file=sys.stderr, flush=True)
    if wrong:
        report.table("Modules that were not named, and alarms of clean pairs", wrong)
    report.table(
        f"Of {each} faults (clean pairs: {clean}), how many were named exactly (gave no alarm)",
        [{"family": family, **row} for family, row in rows.items()],
    )
    quiet = sum(row.pop(CLEAN) for row in rows.values())
    faults = each * len(SIDES) * len(families)
    named = sum(sum(row.values()) for row in rows.values())
    report.claim(f"Share of {faults} faults whose module was not named", 1 - named / faults, at_most=0.05)
    pairs = clean * len(families)
    report.claim(f"Alarms of {pairs} clean pairs", pairs - quiet, at_most=0)
    report.write()


def _prepare() -> None:
    import torch
    import transformers  # noqa: F401 - what is loaded once

    import ortlab  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # collections between runs need not look at the libraries


def outcome(family: str, side: str, number: int) -> dict[str, str]:
    """Return what was said that is wrong; empty if nothing."""
    try:
        return clean_pair(family, number) if side == CLEAN else trial(family, side, number)
    except Exception as error:  # noqa: BLE001 - a comparison that fails has named nothing
        return {"operator": "", "module": "", "said": f"{type(error).__name__}: {error}"}


def lab_of(family: str, seed: int) -> tuple[Any, Any]:
    """Return a lab that has made one step, and its model."""
    import torch
    from models import families

    model = families(2, 32)[family]("eager")
    torch.manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in model.parameters():  # norms are one and biases zero at first, which hides faults
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model, wrapped(model, family, seed)


def wrapped(model: Any, family: str, seed: int) -> Any:
    """Wrap a model, and make a step."""
    import torch
    from models import batches

    import ortlab

    batch = batches(family, seed % 3 + 1, 2, 8)[-1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> Any:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR", engine="eager")
    lab.step(step, progress=False)
    return lab.set(engine="ort")


def trial(family: str, side: str, number: int) -> dict[str, str]:
    """Inject one fault, and return what was said instead of its module; empty if that was named."""
    draw = random.Random(f"{family} {side} {number}")
    model, lab = lab_of(family, number)
    try:
        if side.startswith("ort"):
            fault = InGraph(model, draw, backward=side.endswith("backward"))
            found = lab._parity(1, dropout=False, seeds=False, progress=False, edit=fault)  # noqa: SLF001
        else:
            fault = InModule(model, draw, backward=side.endswith("backward"))
            lab.set(engine="eager")
            with fault.recording():
                lab.rerun(progress=False)
            lab.set(engine="ort")
            with fault.injected():
                found = lab.parity(1, seeds=False, progress=False)
    finally:
        lab.unwrap(forget=True)
    first = found.first
    if first is not None and first.module == fault.module:
        return {}
    said = "nothing" if first is None else f"{first.module} ({first.phase}: {first.reason}; {first.others})"
    return {"operator": fault.operator, "module": fault.module, "said": said}


def clean_pair(family: str, number: int) -> dict[str, str]:
    """Compare without a fault, and return what was said; empty if nothing."""
    _, lab = lab_of(family, 1000 + number)
    try:
        first = lab.parity(2, seeds=False, progress=False).first
    finally:
        lab.unwrap(forget=True)
    if first is None:
        return {}
    distance = first.pair.distance
    return {
        "operator": "",
        "module": "",
        "said": f"{first.module} ({first.phase}: {first.reason}; {first.pair.site}: {distance}, {first.pair.limit})",
    }


class InGraph:
    """Multiplies the result of one node of ONNX Runtime's gradient graph."""

    def __init__(self, model: Any, draw: random.Random, *, backward: bool) -> None:
        self.module = self.operator = ""
        self._model, self._draw, self._backward = model, draw, backward
        self._name = ""

    def __call__(self, model: Any) -> None:
        """Change a gradient graph in place; the same node each time."""
        import onnx

        graph = model.graph
        if not self._name:
            felt = _felt(graph)
            made = {name for node in graph.node for name in node.output}
            names = [
                node.output[0]
                for node in graph.node
                if node.op_type in IN_GRAPH
                and "/" in node.name
                and ("_Grad/" in node.name) == self._backward
                and node.output[0] in felt
                and ("_grad" in node.output[0] if self._backward else f"{node.output[0]}_grad" in made)
            ]
            self._name = self._draw.choice(names)
        place = next(i for i, node in enumerate(graph.node) if self._name in node.output)
        node = graph.node[place]
        self.module, self.operator = place_of(self._model, node.name), f"{node.op_type} {node.name}"
        node.output[[*node.output].index(self._name)] = raw = f"{self._name}_before_fault"
        factor = f"{self._name}_fault"
        typed = onnx.helper.make_tensor_value_info(
            raw, onnx.TensorProto.FLOAT, None
        )  # ATen's is not inferred
        graph.value_info.append(typed)
        value = onnx.helper.make_tensor(factor, onnx.TensorProto.FLOAT, [], [SIZE])
        constant = onnx.helper.make_node("Constant", [], [factor], name=f"{factor}_constant", value=value)
        graph.node.insert(place + 1, onnx.helper.make_node("Mul", [raw, factor], [self._name], name=factor))
        graph.node.insert(place + 1, constant)


def _felt(graph: Any) -> set[str]:
    """Name the values that a gradient of a parameter is computed from."""
    given = {value.name for value in graph.input}
    felt = {value.name for value in graph.output if value.name.removesuffix("_grad") in given}
    for node in reversed(graph.node):
        if not felt.isdisjoint(node.output):
            felt.update(node.input)
    return felt


def place_of(model: Any, name: str) -> str:
    """Return the path of the module that a node of the graph is from."""
    from ortlab.engine.capture import Scopes

    return Scopes(model).path(name.partition("_Grad/")[0])


class InModule:
    """Multiplies the result of one operator, or its gradient, in the forward of a module that PyTorch runs."""

    def __init__(self, model: Any, draw: random.Random, *, backward: bool) -> None:
        self.module = self.operator = ""
        self._model, self._draw, self._backward = model, draw, backward
        self._paths = {id(part): path for path, part in model.named_modules()}
        self._seen: list[tuple[str, str, int]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the operators of a step; one of them is drawn at the end."""
        with self._mode(self._note):
            yield
        self.module, self.operator, _ = self._chosen = self._draw.choice(self._seen)

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Inject the fault in the block, into each forward anew."""
        counting = self._model.register_forward_pre_hook(lambda *_: self._seen.clear())
        try:
            with self._mode(self._change):
                yield
        finally:
            counting.remove()

    def _mode(self, act: Any) -> Any:
        import torch
        from torch.overrides import TorchFunctionMode

        fault = self

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                name = getattr(function, "__name__", "")
                if (
                    name not in COMPUTING
                    or torch._C._get_tracing_state() is not None  # noqa: SLF001
                    or not isinstance(result, torch.Tensor)
                    or not (result.is_floating_point() and result.requires_grad)
                ):
                    return result
                path = fault._caller()
                return result if path is None else act(path, name, result)

        return Mode()

    def _caller(self) -> str | None:
        import torch

        frame = sys._getframe(2)  # noqa: SLF001
        while frame is not None:
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
            if isinstance(owner, torch.nn.Module):
                return self._paths.get(id(owner))
            frame = frame.f_back
        return None

    def _note(self, path: str, name: str, result: Any) -> Any:
        self._seen.append((path, name, sum(one[:2] == (path, name) for one in self._seen)))
        return result

    def _change(self, path: str, name: str, result: Any) -> Any:
        import torch

        place = (path, name, sum(one[:2] == (path, name) for one in self._seen))
        self._seen.append(place)
        if place != self._chosen:
            return result

        class Fault(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, tensor: Any) -> Any:  # noqa: ARG004
                return tensor.clone() if backward else tensor * SIZE

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004
                return gradient * SIZE if backward else gradient

        backward = self._backward
        return Fault.apply(result)


if __name__ == "__main__":
    main()
