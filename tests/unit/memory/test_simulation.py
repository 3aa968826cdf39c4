"""A step with recompute plans is predicted from a profiled one without; ORT's own step with them is the witness."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch
from small_transformers import batch_of, bert, gpt2, llama, step_of

import ortlab
from ortlab.engine.operators import chunked_loss
from ortlab.engine.operators.torch_kernels import KERNELS
from ortlab.errors import ExecutionError, StepError
from ortlab.memory.recompute import with_places
from ortlab.memory.trace import WRITTEN_OVER, Trace, TracedNode, lifetimes

BATCH, LENGTH = 2, 16


SIZES = {"layers": 3, "attn_implementation": "eager"}
MODELS = {
    "bert": lambda: bert(**SIZES, drop=0.1),
    "gpt2": lambda: gpt2(**SIZES, drop=0.1, n_positions=32, use_cache=True),
    "llama": lambda: llama(**SIZES, use_cache=True),
}


@pytest.fixture(scope="module", params=MODELS)
def profiled(request):
    """Return a lab, the trace of its step in the order of sessions with plans, and the places of its plans."""
    torch.manual_seed(5)
    model = MODELS[request.param]()
    batch = batch_of(BATCH, LENGTH, first=2, mask=True)
    step = step_of(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3))
    lab = ortlab.wrap(model)
    lab.step(step, progress=False)
    trace = lab.profile(1, memory_efficient_order=True)
    yield lab, trace, lab._bench.ort.execution.recompute_places()
    lab.unwrap(forget=True)


_CONSTANT = re.compile(r".*(?=_(flags|epsilon)$)")


def _edges(trace: Trace, plans: tuple[str, ...]) -> list[tuple[str, tuple[str, ...], bool]]:
    # With its own dropouts in the graph, which it repeats, ORT reads the same shape of another layer. Constants that
    # calls take are shared by equal ones where ORT optimizes a graph, not where plans have acted before.
    named = _shape_of_any_layer if any("Dropout" in plan for plan in plans) else str
    return sorted(
        (node.name, tuple(named(_CONSTANT.sub("", name)) for name in node.inputs), node.backward)
        for node in trace.nodes
    )


def _shape_of_any_layer(name: str) -> str:
    return re.sub(r"/layer\.\d+/", "/layer/", name) if name.endswith("x_shape") else name


def _forward_peak(found) -> int:
    return int(found.live[: found.first_backward].max())


def _plans(places) -> list[str]:
    return list(dict.fromkeys(f"{place.cluster}:{place.strategy}:-1" for place in places.places))


@pytest.mark.row("F7", "F13")
def test_every_plan_and_all_together_run_as_predicted(profiled):
    lab, trace, places = profiled
    plans = _plans(places)
    assert len(plans) > 4
    before = lab._bench.configuration
    try:
        for chosen in [(plans[0],), (plans[-1],), tuple(plans[1:4]), tuple(plans)]:
            predicted = with_places(trace, [place for plan in chosen for place in places.of(plan)], chosen)
            lab.set(memory_plan=list(chosen))
            ran = lab.profile(1)
            assert _edges(predicted, chosen) == _edges(ran, chosen), chosen
            assert _forward_peak(lifetimes(predicted)) == _forward_peak(lifetimes(ran))
            assert lifetimes(predicted).peak == lifetimes(ran).peak
            assert ran.plans == chosen
    finally:
        lab._bench.configure(before)
        lab.rerun(progress=False)


def test_the_first_places_run_as_predicted(profiled):
    lab, trace, places = profiled
    plan = next(plan for plan in _plans(places) if len(places.of(plan)) > 1)
    before = lab._bench.configuration
    partial = plan.rsplit(":", 1)[0] + ":1"
    try:
        lab.set(memory_plan=[partial])
        ran = lab.profile(1)
    finally:
        lab._bench.configure(before)
        lab.rerun(progress=False)
    predicted = with_places(trace, places.of(plan)[:1])
    copies = [node.recomputes for node in ran.nodes if node.recomputes]
    assert copies == [node.recomputes for node in predicted.nodes if node.recomputes]
    assert copies
    assert lifetimes(predicted).peak == lifetimes(ran).peak


def test_a_trace_has_the_sizes_and_times_of_every_node(profiled):
    lab, trace, _ = profiled
    graph = lab.graph("execution")
    assert len(trace.nodes) == graph.node_count - 1  # the YieldOp is no kernel
    assert all(node.ms >= 0 for node in trace.nodes)
    assert trace.forward_ms > 0
    assert trace.backward_ms > 0
    assert trace.recomputed_ms == 0
    logits = next(name for name in trace.returned if trace.sizes[name] == BATCH * LENGTH * 64 * 4)
    assert logits not in trace.held  # the step keeps the loss only
    assert len(trace.held) == 1
    table = trace.table()
    assert table["nodes"].sum() == len(trace.nodes)
    assert set(table["pass"]) == {"forward", "backward"}


def test_an_output_that_the_step_keeps_is_held(profiled):
    lab, _, _ = profiled
    experiment = lab._bench.experiment
    module = lab.module
    kept = []

    def step():
        ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
        output = module(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        kept[:] = [output]
        output.loss.backward()
        module.zero_grad()
        return output.loss

    try:
        lab.step(step, progress=False)
        trace = lab.profile(1)
    finally:
        lab._bench.experiment = experiment
        kept.clear()
    assert any(trace.sizes[name] == BATCH * LENGTH * 64 * 4 for name in trace.held)


def test_what_a_profile_changes_is_put_back(profiled):
    lab, _, _ = profiled
    before = [tensor.clone() for tensor in (*lab.module.state_dict().values(), torch.get_rng_state())]
    runs, options, session = len(lab.runs), lab.options, lab._bench.ort.execution._manager._execution_agent
    lab.profile(2)
    after = (*lab.module.state_dict().values(), torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (len(lab.runs), lab.options) == (runs, options)
    assert lab._bench.ort.execution._manager._execution_agent is session


def test_extra_time_counts_a_node_once(profiled):
    _, trace, places = profiled
    several = places.of(_plans(places)[0])
    times = {node.name: node.ms for node in trace.nodes}
    once = sum(times[name] for name in {name for place in several for name in place.nodes})
    assert with_places(trace, [*several, *several]).recomputed_ms == with_places(trace, several).recomputed_ms
    assert with_places(trace, several).recomputed_ms == pytest.approx(once)


def test_a_step_is_profiled_whichever_engine_is_set(lab, experiment):
    with pytest.raises(StepError, match="no step to go back to"):
        lab.profile()
    lab.step(experiment.step, progress=False)
    lab.set(engine="eager")
    assert lab.profile(1).nodes
    assert lab.engine == "eager"


def test_a_failing_step_leaves_the_lab_as_it_was(lab, experiment):
    calls = ctypes.c_int()  # in C, where no way back to the start looks

    def step():
        calls.value += 1
        if calls.value > 1:
            raise ValueError("no batch")
        return experiment.step()

    lab.step(step, progress=False)
    before = experiment.state()
    with pytest.raises(ValueError, match="no batch"):
        lab.profile()
    assert all(torch.equal(one, other) for one, other in zip(before, experiment.state(), strict=True))
    assert lab.status.state == "ready"


def test_a_step_without_backward_is_no_profile(lab, experiment):
    lab.step(experiment.step, progress=False)
    lab._bench.experiment = lab._bench.experiment.__class__(
        lambda: experiment.model(experiment.x), 1, lab._bench.experiment.start
    )
    with pytest.raises(ExecutionError, match="no forward was followed by its backward"):
        lab.profile(1)


def _node(name, inputs, outputs, *, operator="Gelu", backward=False):
    return TracedNode(name, operator, tuple(inputs), tuple(outputs), backward, 1.0)


def test_a_buffer_lives_until_its_last_reader():
    trace = Trace(
        nodes=(
            _node("a", ["x"], ["h"]),
            _node("v", ["h"], ["view"], operator="Reshape"),
            _node("b", ["view"], ["y", "unread"]),
            _node("c", ["dy", "h"], ["dh"], backward=True),
            _node("d", ["dh"], ["gradient"], backward=True),
        ),
        sizes={"h": 100, "view": 100, "y": 10, "unread": 1, "dh": 20, "gradient": 5},
        returned=frozenset({"y"}),
        gradients=frozenset({"gradient"}),
        given={"dy": 10},
    )
    found = lifetimes(trace)
    # The view is the memory of h; y is given back when the backward starts; what nobody reads stays.
    np.testing.assert_array_equal(found.live, [100, 100, 111, 100 + 1 + 20 + 10, 1 + 20 + 5])
    assert [one.value for one in found.kept] == ["h", "unread"]
    assert (_forward_peak(found), found.peak) == (111, 131)
    assert found.peak_at == 3
    assert [one.value for one in found.at(3)] == ["h", "dh", "dy", "unread"]


def test_what_a_pass_through_hands_on_stays_where_it_is():
    trace = Trace(
        nodes=(
            _node("a", ["x"], ["h", "mask"]),
            _node("p", ["h", "mask"], ["h_kept", "mask_kept"], operator="com.microsoft.PassThrough"),
            _node("b", ["dy", "h_kept", "mask_kept"], ["gradient"], backward=True),
        ),
        sizes={"h": 100, "mask": 25, "h_kept": 100, "mask_kept": 25, "gradient": 5},
        gradients=frozenset({"gradient"}),
        given={"dy": 10},
    )
    np.testing.assert_array_equal(lifetimes(trace).live, [125, 125, 140])


def test_calls_that_write_over_an_input_are_known_as_their_schemas_say():
    """A result that is in the memory of an input takes none: not known, it was counted twice in each peak."""
    assert chunked_loss.KERNEL in KERNELS
    found = {}
    for one in KERNELS.values():
        written = [argument.alias_info and argument.alias_info.is_write for argument in one.schema.arguments]
        if any(written) and any(result.alias_info for result in one.schema.returns):
            found[one.schema.name] = tuple(number for number, over in enumerate(written) if over)
    assert found == WRITTEN_OVER
