"""Blocks of a GPU's allocator get the names of what is in them, and never a wrong one."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from typing import ClassVar

import cuda_history
import pytest
import small_transformers
import torch
from torch.cuda import _memory_viz

import ortlab
from ortlab.analyses import memory as measuring
from ortlab.analyses.memory import CudaHistory, held_inputs
from ortlab.engine.extensions import bridge
from ortlab.engine.saved_activations import earliest_places
from ortlab.errors import StepError
from ortlab.memory.device_snapshot import KeptBuffer, MemorySnapshot, maker_of, name_blocks, with_names
from ortlab.memory.trace import lifetimes
from ortlab.render import html, text


class Watched(torch.autograd.Function):
    """Asks for memory through the bridge to torch's pool, while ONNX Runtime runs a forward and a backward."""

    stacks: ClassVar[dict[str, list]] = {}

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        Watched.ask("forward")
        ctx.factor = 2
        return x * ctx.factor

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        Watched.ask("backward")
        return gradient * ctx.factor

    @staticmethod
    def ask(where: str) -> None:
        def allocate(_: int) -> int:
            Watched.stacks[where] = cuda_history.stack()
            return cuda_history.SEGMENT

        assert bridge(allocate, lambda _: None, lambda: None).allocate(64) == cuda_history.SEGMENT


class Net(torch.nn.Module):
    """A layer around `Watched`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Watched.apply(self.hidden(x))


@pytest.fixture(scope="module")
def stacks():
    """Return the stacks of allocations in a forward and a backward on ONNX Runtime."""
    torch.manual_seed(0)
    model = Net()
    lab = ortlab.wrap(model)
    lab.step(lambda: model(torch.ones(2, 4)).sum().backward())
    lab.unwrap()
    return dict(Watched.stacks)


@pytest.fixture(scope="module")
def bert():
    """Wrap a BERT of two layers after a step, with its optimizer and its batch."""
    torch.manual_seed(0)
    more = {"max_position_embeddings": 16, "attn_implementation": "eager"}
    model = small_transformers.bert(words=96, drop=0.1, intermediate_size=128, **more)
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(0, 96, (4, 16))

    def step():
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        return loss

    lab = ortlab.wrap(model)
    lab.step(step, watch=[optimizer])
    yield lab
    lab.unwrap()


@pytest.fixture(scope="module")
def kept(bert):
    """Return what the BERT keeps, with the places where its memory can come from."""
    return measuring._kept_buffers(bert._bench, bert.activations())


def forward(trace, stack, seed):
    """Allocate what a profiled forward did, in its order; where ORT may work in place, it does so by chance.

    Returns
    -------
    Device, dict of str to int
        The device at the end of the forward; by value: the address where it is.
    """
    chance, device, where = random.Random(seed), cuda_history.Device(), {}
    living = lifetimes(trace)
    for place, node in enumerate(trace.nodes[: trace.first_backward]):
        dying = [one for one in living.buffers if one.last == place and one.value in where]
        for buffer in (one for one in living.buffers if one.first == place and one.size):
            same = [one for one in dying if one.size == buffer.size and one.value in node.inputs]
            if same and chance.random() < 0.5:
                where[buffer.value] = where.pop(same[0].value)
                dying.remove(same[0])
            else:
                where[buffer.value] = device.allocate(buffer.size, stack)
            scratch = device.allocate(chance.choice([64, buffer.size]), stack)
            device.free(scratch)
        for one in dying:
            device.free(where.pop(one.value))
    return device, where


@pytest.mark.row("E5")
@pytest.mark.parametrize("seed", range(8))
def test_no_block_of_a_real_forward_gets_a_wrong_name(bert, kept, stacks, seed):
    trace = bert.profile()
    device, where = forward(trace, stacks["forward"], seed)
    blocks = name_blocks(device.snapshot(), 0, kept, {})
    at = {f"{row.value} ({row.operator})": where.get(row.value) for row in bert.activations().rows}
    exact = {one for one in blocks if len(one.names) == 1}
    assert all(one.address == at[one.names[0]] for one in exact)
    held = {address: name for name, address in at.items()}
    for one in blocks:
        if one.names:
            assert held[one.address] in one.names
        assert one.maker == "ONNX Runtime, forward"
    stashed = sum(one.requested for one in blocks if one.address in held)
    # What has no name is small: sizes are not told apart below 256 bytes.
    assert sum(one.requested for one in blocks if one.names) > 0.95 * stashed
    assert sum(one.requested for one in exact) > 0.25 * stashed


def test_places_go_back_over_what_may_be_written_in_place_only(bert):
    activations = bert.activations()
    execution = bert._bench.engines(None)[""].execution
    earliest = earliest_places(execution, [row.value for row in activations.rows])
    assert set(earliest) == {row.value for row in activations.rows}
    for row in activations.rows:
        assert earliest[row.value] <= row.position
    own = {row.operator for row in activations.rows if earliest[row.value] == row.position}
    assert {"FusedMatMul", "MatMul", "Transpose"} & own
    assert not earliest_places(execution, ["nothing"])


def test_who_asked_is_told_from_the_stack_of_a_real_run(stacks):
    assert maker_of(stacks["forward"]) == "ONNX Runtime, forward"
    assert maker_of(stacks["backward"]) == "ONNX Runtime, backward"
    assert any(frame["filename"].endswith("extensions.py") for frame in stacks["forward"])
    assert maker_of(cuda_history.stack()) == "PyTorch"
    assert maker_of([]) == "before the recording"
    agent = {"filename": "_graph_execution_manager.py", "line": 1, "name": "Manager._create_execution_agent"}
    assert maker_of([agent]) == "ONNX Runtime, building a session"


def named(stack, kept, sizes):
    """Name blocks of these sizes, allocated in this order; return the names in that order."""
    device = cuda_history.Device()
    addresses = [device.allocate(size, stack) for size in sizes]
    found = {one.address: one for one in name_blocks(device.snapshot(), 0, kept, {})}
    return [(found[address].names, found[address].known_by) for address in addresses]


def test_size_order_and_doubt(stacks):
    stack = stacks["forward"]
    one, other = KeptBuffer("a", 1024, 1, 1), KeptBuffer("b", 1024, 4, 5)
    assert named(stack, [one], [1024]) == [(("a",), "size")]
    assert named(stack, [one], [1000]) == [(("a",), "size")]  # ORT may have rounded
    assert named(stack, [one], [2048]) == [((), "")]
    assert named(stack, [other, one], [1024, 1024]) == [
        (("a",), "size and order"),
        (("b",), "size and order"),
    ]
    both = (("a", "b"), "size, one of several")
    assert named(stack, [other, one], [1024]) == [both]
    assert named(stack, [one], [1024, 1024]) == [((), ""), ((), "")]  # one is something else
    overlapping = KeptBuffer("b", 1024, 1, 5)
    assert named(stack, [one, overlapping], [1024, 1024]) == [both, both]
    elsewhere = KeptBuffer("b", 1024, 4, 5, part="decoder")
    assert named(stack, [one, elsewhere], [1024, 1024]) == [both, both]
    assert named(cuda_history.stack(), [one], [1024]) == [((), "")]  # not ORT's


@pytest.fixture
def snapshot(bert, kept, stacks):
    """A snapshot of a step of the BERT, as the lab makes it of torch's."""
    device, _ = forward(bert.profile(), stacks["forward"], 0)
    weight = cuda_history.SEGMENT // 2
    device.place(weight, 3000, [])
    first = device.snapshot()
    blocks = name_blocks(first, 0, kept, {weight: "parameter x"})
    gradient = device.allocate(3000, stacks["backward"])
    device.free(device.allocate(4096, stacks["backward"]))
    for one in blocks:
        if one.event >= 0:
            device.free(one.address)
    last = device.snapshot()
    untouched = copy.deepcopy(last)
    held = {weight: "parameter x", gradient: "gradient of x"}
    whole = with_names(last, 0, blocks, held)
    assert last == untouched
    return MemorySnapshot(blocks, "cuda:0", "ort", bert.options.to_dict(), 0, whole)


@pytest.mark.row("E5")
def test_the_file_is_read_by_torch_and_has_the_names(snapshot, tmp_path):
    file = snapshot.save(tmp_path / "step.pickle")
    read = pickle.loads(file.read_bytes())  # noqa: S301 - written above
    lines = _memory_viz.memory(read, format_flamegraph=lambda written: written)
    assert "parameter x [address]" in lines
    assert "gradient of x [address]" in lines
    assert "entries" in _memory_viz.trace(read)
    assert _memory_viz.segsum(read)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(read)
    allocations = [event for event in read["device_traces"][0] if event["action"] == "alloc"]
    words = [event["frames"][0]["name"] for event in allocations]
    assert all(event["frames"][0]["filename"] == "ortlab" for event in allocations)
    assert sum("[size" in one for one in words) == sum("size" in one.known_by for one in snapshot.blocks)
    unknown = sum(one.event >= 0 and not one.names for one in snapshot.blocks)
    assert words.count("ONNX Runtime, forward: unknown") == unknown
    assert words[-2:] == [
        "gradient of x [address]",
        "ONNX Runtime, backward: not kept from forward to backward",
    ]
    with pytest.raises(StepError, match="cannot be written"):
        snapshot.save(tmp_path / "nowhere" / "step.pickle")


def test_the_page_adds_up_and_says_how_it_is_known(snapshot):
    assert sum(size for _, size in snapshot.bytes_by().values()) == snapshot.total_bytes
    assert len(snapshot.table()) == len(snapshot.blocks)
    assert snapshot.to_dict()["total_bytes"] == snapshot.total_bytes
    for page in (text.render(snapshot), html.render(snapshot)):
        assert "Memory of cuda:0 at the end of a forward" in page
        assert "size and order" in page
        assert "one of" in page
        assert "parameter x" in page


class Written:
    """The history of a device whose blocks are the model's own tensors."""

    def __init__(self, model, optimizer, stack, *, fails=False) -> None:
        self._tensors = lambda: (
            *model.parameters(),
            *(one.grad for one in model.parameters() if one.grad is not None),
            *(value for state in optimizer.state.values() for value in state.values()),
        )
        self._stack, self._fails = stack, fails
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def read(self) -> dict:
        self.calls.append("read")
        if self._fails:
            raise RuntimeError("the driver is gone")
        device = cuda_history.Device()
        for tensor in self._tensors():
            device.place(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes(), [])
        device.allocate(12345, self._stack)
        return device.snapshot()

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def on_gpu(bert, stacks, monkeypatch):
    """Let the lab take snapshots of `Written`, as if its model were on a GPU."""

    def prepare(**how):
        written = Written(bert.module, bert._bench.experiment.start.stateful[0], stacks["forward"], **how)
        monkeypatch.setattr(measuring, "_gpu_of", lambda _: torch.device("cuda:0"))
        monkeypatch.setattr(measuring, "CudaHistory", lambda: written)
        return written

    return prepare


def state(lab):
    """What a snapshot leaves as it was."""
    tensors = {name: tensor.clone() for name, tensor in lab.module.state_dict().items()}
    return tensors, torch.get_rng_state(), lab.options, len(lab.runs)


def test_a_lab_names_the_tensors_of_a_step_and_leaves_all_as_it_was(bert, on_gpu):
    written, before = on_gpu(), state(bert)
    found = bert.memory_snapshot()
    assert written.calls == ["start", "read", "read", "stop"]
    names = {name for one in found.blocks for name in one.names}
    weight = "bert.encoder.layer.0.intermediate.dense.weight"
    assert {f"parameter {weight}", f"exp_avg of {weight}"} <= names
    assert (found.device, found.engine) == ("cuda:0", "ort")
    (unknown,) = [one for one in found.blocks if one.requested == 12345]
    assert (unknown.names, unknown.maker) == ((), "ONNX Runtime, forward")
    written_names = {
        frame["name"]
        for segment in found.snapshot["segments"]
        for block in segment["blocks"]
        for frame in block["frames"]
    }
    assert f"gradient of {weight} [address]" in written_names
    after = state(bert)
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    assert torch.equal(after[1], before[1])
    assert after[2:] == before[2:]
    bert.rerun()


def test_inputs_are_named_as_they_are_passed():
    x, y = torch.ones(2), torch.ones(3)
    found = held_inputs((x,), {"batch": {"mask": y}, "flag": True})
    names = {"input 0": x, "input batch['mask']": y}
    assert found == {tensor.untyped_storage().data_ptr(): name for name, tensor in names.items()}


def test_a_failure_in_between_leaves_all_as_it_was(bert, on_gpu):
    written, before = on_gpu(fails=True), state(bert)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        bert.memory_snapshot()
    assert written.calls == ["start", "read", "stop"]
    after = state(bert)
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    assert torch.equal(after[1], before[1])
    assert after[2:] == before[2:]


def test_torch_is_asked_with_arguments_that_it_has(monkeypatch):
    accepted = inspect.signature(torch.cuda.memory._record_memory_history)
    asked = []
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda *given, **named: asked.append(dict(accepted.bind(*given, **named).arguments)),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append({}))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": []})
    history = CudaHistory()
    history.start()
    assert asked == [{"enabled": None}, {"enabled": "all", "context": "all", "stacks": "python"}]
    assert history.read() == {"segments": [], "device_traces": []}
    history.stop()
    assert asked[2:] == [{}, {"enabled": None}]


def test_on_a_cpu_it_says_what_it_needs(bert):
    with pytest.raises(StepError, match="needs an NVIDIA GPU") as caught:
        bert.memory_snapshot()
    assert "the model is on cpu" in caught.value.why
    assert "%ort_memory" in caught.value.fix
