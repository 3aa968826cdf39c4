"""Where memory plans and levels recompute, on real transformers of three families."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import pytest
import torch
from small_transformers import batch_of, bert, gpt2, llama

import ortlab
from ortlab.engine.passes.training_graph import HIDING, leaving_alone
from ortlab.engine.recompute_plans import check_places, find_places
from ortlab.engine.sessions import seed
from ortlab.errors import BuildError, OptionError
from ortlab.render.text import render

if TYPE_CHECKING:
    from ortlab.memory.recompute import RecomputePlaces

LAYERS = 3
COPY = "_recompute"


SIZES = {"layers": LAYERS, "attn_implementation": "eager"}
MODELS = {
    "bert": lambda drop: bert(**SIZES, drop=drop, max_position_embeddings=16),
    "gpt2": lambda drop: gpt2(**SIZES, drop=drop, n_positions=16),
    "llama": lambda drop: llama(**SIZES, drop=drop, max_position_embeddings=16),
}


class Trained:
    """A tiny language model in a lab, with a batch."""

    def __init__(self, name: str, dropout: float) -> None:
        torch.manual_seed(11)
        self.model = MODELS[name](dropout).train()
        self.lab = ortlab.wrap(self.model)
        self.batch = batch_of(2, 16, mask=True)

    def gradients(self, **options: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run a step from the same start with these options; return loss and gradients."""
        self.lab.set(memory_plan=(), memory_level=0)
        self.lab.set(**options)
        seed(5)
        self.model.zero_grad()
        loss = self.model(**self.batch).loss
        loss.backward()
        return loss.detach(), [one.grad.clone() for one in self.model.parameters()]

    @property
    def places(self) -> RecomputePlaces:
        return self.lab._bench.ort.execution.recompute_places()

    def graph(self) -> onnx.GraphProto:
        return self.lab.graph("execution").model.graph


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest) -> Trained:
    made = Trained(request.param, dropout=0.0)
    made.gradients()
    return made


def copied(graph: onnx.GraphProto) -> list[str]:
    """Name what runs again."""
    return [node.name.removesuffix(COPY) for node in graph.node if node.name.endswith(COPY)]


def test_a_layer_is_known_by_its_residual_wherever_the_model_normalises(trained: Trained) -> None:
    places = trained.places
    assert len(places.boundaries) == LAYERS
    # What goes into the first layer comes of the embeddings, which no plan recomputes.
    assert sum(place.boundary for place in places.places) == LAYERS - 1


def test_a_count_recomputes_the_first_places_and_no_other(trained: Trained) -> None:
    names = Counter(f"{place.cluster}:{place.strategy}" for place in trained.places.places)
    name = next(name for name, count in names.most_common() if count >= LAYERS)
    places = trained.places.of(name)
    for count in (0, 1, 2, len(places), -1):
        expected = places if count == -1 else places[:count]
        trained.gradients(memory_plan=[f"{name}:{count}"])
        graph = trained.graph()
        assert set(copied(graph)) == {node for place in expected for node in place.nodes}, count
        hidden = [node for node in graph.node if node.op_type == HIDING]
        assert len(hidden) == (len(places) - len(expected) if expected else 0)


def test_a_level_recomputes_all_but_the_ends_of_layers(trained: Trained) -> None:
    trained.gradients(memory_level=1)
    again = {
        output
        for node in trained.graph().node
        if node.name.endswith(COPY)
        for output in node.output
        if output
    }
    for place in trained.places.places:
        made = {output + COPY for output in place.outputs}
        assert again.isdisjoint(made) if place.boundary else again >= made, place


def test_a_level_recomputes_no_layer_from_another(trained: Trained) -> None:
    def reach(**options: object) -> int:
        """Return how many nodes of the forward the longest chain of copies has."""
        trained.gradients(**options)
        depth: dict[str, int] = {}
        for node in trained.graph().node:
            if node.name.endswith(COPY):
                below = 1 + max((depth.get(value, 0) for value in node.input), default=0)
                depth.update(dict.fromkeys(node.output, below))
        return max(depth.values())

    everything = {f"{place.cluster}:1:-1" for place in trained.places.places if place.strategy == 1}
    chain = reach(memory_plan=sorted(everything))
    assert reach(memory_level=1) <= chain / (LAYERS - 1)


def test_recomputing_changes_no_number(trained: Trained) -> None:
    loss, gradients = trained.gradients()
    for options in ({"memory_level": 1}, {"memory_level": 2}):
        again, others = trained.gradients(**options)
        torch.testing.assert_close(again, loss)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_what_is_recomputed_drops_out_what_the_forward_did(name: str) -> None:
    made = Trained(name, dropout=0.3)
    made.gradients()
    everything = sorted({f"{place.cluster}:1:-1" for place in made.places.places})
    loss, gradients = made.gradients(memory_plan=everything)
    again, others = made.gradients(memory_level=1)
    assert torch.equal(again, loss)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_what_the_model_returns_can_be_a_place_that_a_count_leaves_out() -> None:
    made = Trained("bert", 0.0)
    made.model.config.output_hidden_states = True  # each is the result of a layer normalisation
    loss, gradients = made.gradients()
    name = "LayerNormalization+:1"
    assert len(made.places.of(name)) > 1
    again, others = made.gradients(memory_plan=[f"{name}:1"])
    assert any(node.op_type == HIDING for node in made.graph().node)
    assert torch.equal(again, loss)
    assert all(map(torch.equal, others, gradients))
    returned = made.model(**made.batch)
    states = [one.detach().clone() for one in returned.hidden_states]
    returned.loss.backward()
    assert all(map(torch.equal, returned.hidden_states, states))


def test_results_that_a_graph_does_not_make_are_named(trained: Trained) -> None:
    model = onnx.load_model_from_string(trained.lab._bench.ort.execution.serialized_graph("gradient"))
    result = trained.places.places[0].outputs[0]
    copied_model, missing = leaving_alone(model, [(result,), ("no such value",)])
    assert missing == ["no such value"]
    assert sum(node.op_type == HIDING for node in copied_model.graph.node) == 1
    assert not any(node.op_type == HIDING for node in model.graph.node)


def test_places_that_cannot_be_told_are_an_error(trained: Trained) -> None:
    report = trained.lab._bench.ort.execution.memory_report().insight
    check_places(trained.places, report)
    with pytest.raises(BuildError, match="cannot be told") as caught:
        check_places(find_places([], trained.graph()), report)
    assert ":-1" in caught.value.fix


TABLES = """
import sys
sys.path[:0] = {folders!r}
from test_recompute_places import MODELS, Trained
for name in MODELS:
    trained = Trained(name, 0.2)
    trained.gradients()
    print(trained.lab.plan().table().to_csv())
    print(trained.places)
"""


def test_every_process_says_the_same() -> None:
    here = Path(__file__)
    script = TABLES.format(folders=[str(here.parent), str(here.parents[2])])
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    tables = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "recompute" in tables[0].lower()
    assert tables[0] == tables[1]


def test_a_plan_tells_what_a_level_stands_for_before_it_is_set(trained: Trained) -> None:
    trained.gradients()
    preview = trained.lab.plan(level=1)
    assert trained.lab.options.memory_level == 0
    assert preview.memory_level == 1
    assert all(row.applied is None for row in preview.rows)
    trained.gradients(memory_level=1)
    plan = trained.lab.plan()
    assert plan.level_set == preview.level_set
    assert [(row.config, row.requested) for row in plan.rows] == [
        (row.config, row.requested) for row in preview.rows
    ]
    assert all(row.as_asked for row in plan.rows)
    counts = plan.level_set
    assert counts is not None
    assert counts.layer_ends == LAYERS
    assert counts.all_places - counts.places == LAYERS - 1
    assert "starts again from there. Set it to 0" in render(plan)
    assert trained.lab.plan(level=0).level_set is None


def test_a_level_that_is_none_is_refused(trained: Trained) -> None:
    trained.gradients()
    with pytest.raises(OptionError, match="memory_level"):
        trained.lab.plan(level=3)


def test_a_level_without_layers_says_so() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    lab = ortlab.wrap(module, memory_level=1)
    module(torch.randn(3, 4)).sum().backward()
    plan = lab.plan()
    assert plan.rows
    assert plan.level_set is not None
    assert plan.level_set.layer_ends == 0
    assert "found no transformer layer" in render(plan)


def gelus(count: int) -> torch.nn.Sequential:
    """Make a model whose Gelus ONNX Runtime writes out as nodes without names: it has none of half precision here."""
    torch.manual_seed(2)
    layers = [
        layer
        for _ in range(count)
        for layer in (torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.BatchNorm1d(4))
    ]
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(("count", "recomputed"), [(1, 1), (2, 0)])
def test_nodes_without_a_name_are_recomputed_where_there_is_one(count: int, recomputed: int, wrap) -> None:
    reference, model, x = gelus(count), gelus(count), torch.randn(16, 4)
    reference(x).square().sum().backward()
    lab = wrap(model, cast_strategy="INSERT_AND_REDUCE", static_shape=True, memory_level=1)
    model(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-2, atol=1e-3)
    places = lab._bench.ort.execution.recompute_places().places
    graph = lab.graph("execution").model.graph
    assert len({place.node for place in places}) == count
    assert {place.node for place in places} <= {output for node in graph.node for output in node.output}
    assert all(place.nodes == ("",) and place.outputs == (place.node,) for place in places)
    assert sum(output.endswith(COPY) for node in graph.node for output in node.output) == recomputed


def test_plans_that_recompute_several_nodes_without_a_name_are_refused_with_a_way_out(wrap) -> None:
    lab = wrap(gelus(2), cast_strategy="INSERT_AND_REDUCE", static_shape=True, memory_plan=["Mul+:1:-1"])
    with pytest.raises(BuildError, match="several nodes that have no name") as refused:
        lab.module(torch.randn(16, 4))
    assert "memory_level=1" in refused.value.fix
