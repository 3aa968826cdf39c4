"""What a session applies of the recompute plans that were asked for is read from its graph, and said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engine.operators.quick_choice import BEHIND_PLANS
from ortlab.engine.passes.graph_edits import aten_operator
from ortlab.errors import BuildError, PlanWarning
from ortlab.render import text


class Net(nn.Module):
    """Three layers, and, if wished, a loss that leaves out rows whose label is ignored."""

    def __init__(self, *, loss=False):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 5)
        self.loss = nn.CrossEntropyLoss(ignore_index=-100) if loss else None

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return x.sum() if self.loss is None else self.loss(x.view(-1, 5), labels.view(-1))


LABELS = torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100]])


@pytest.fixture(scope="module")
def lab():
    torch.manual_seed(1)
    model = Net()
    lab = ortlab.wrap(model)
    x = torch.randn(2, 4, 8)
    lab.call = lambda: model(x).backward()
    lab.call()
    yield lab
    lab.unwrap()


def rows(lab):
    return {row.cluster: row for row in lab.plan().rows}


def again(lab, operator):
    """Count the nodes of an operator that run again in the graph that is executed."""
    nodes = lab.graph("execution").model.graph.node
    kinds = {operator, BEHIND_PLANS.get(operator, operator)}
    again = [node for node in nodes if node.name.endswith("_recompute")]
    return sum((aten_operator(node) or node.op_type) in kinds for node in again)


@pytest.mark.row("F16")
@pytest.mark.parametrize(("count", "applied"), [(-1, 3), (1, 1), (2, 2), (9, 3), (0, 0)])
def test_what_is_applied_is_what_runs_again(lab, count, applied):
    lab.set(memory_plan=[f"Gelu+:1:{count}"])
    lab.call()
    row = rows(lab)["Gelu+"]
    assert again(lab, "Gelu") == applied
    assert (row.requested, row.applied) == ((count, applied) if count else (None, None))
    assert row.enabled == bool(count)
    assert row.as_asked == (count != 9)
    said = "asked for 9, applied in 3 of 3 places. It has no more." in text.render(lab.plan())
    assert said == (count == 9)
    if count:
        assert f"yes, {applied} of 3" in text.render(lab.plan())
        assert row.sentence == "Recompute GELU in 3 layers instead of keeping it."
        assert lab.plan().asked == (f"Gelu+:1:{count}",)


def test_several_plans_are_counted_apart(lab):
    lab.set(memory_plan=["Gelu+:1:2", "LayerNormalization+:1:-1"])
    lab.call()
    found = rows(lab)
    assert (found["Gelu+"].applied, found["LayerNormalization+"].applied) == (2, 3)
    assert (again(lab, "Gelu"), again(lab, "LayerNormalization")) == (2, 3)
    assert all(row.applied is None for row in found.values() if not row.enabled)


@pytest.mark.parametrize("plan", ["BiasGelu+:1:-1", "Tile+:1:-1", "Gelu+LayerNormalization+:1:-1"])
def test_a_plan_of_another_model_is_not_passed_over_in_silence(lab, plan):
    lab.set(memory_plan=[plan, "Gelu+:1:-1"])
    with pytest.warns(PlanWarning, match=plan.split(":")[0].replace("+", r"\+")):
        lab.call()
    assert plan in lab.messages[-1].text
    found = lab.plan()
    assert found.absent == (plan,)
    assert f"Not applied: {plan}" in text.render(found)
    assert ("Near names: " in " ".join(text.render(found).split())) == ("Gelu" in plan)
    assert found.enabled == ("Gelu+:1:-1",)
    lab.call()  # it is said once, when the session is made


def test_the_graph_that_ortlab_has_written_for_itself_leaves_no_message(lab):
    lab.set(memory_plan=["Gelu+:1:-1"], log_level="WARNING")
    lab.call()
    assert not [message for message in lab.messages if "Serializing optimized model" in message.text]


@pytest.mark.row("T16")
def test_the_labels_that_count_are_worked_out_for_another_batch(wrap):
    torch.manual_seed(1)
    model = Net(loss=True)
    lab = wrap(model)
    model(torch.randn(2, 4, 8), LABELS).backward()
    plan = lab.plan()
    symbol = next(name for name in plan.label_totals if name.startswith("valid_indices_count"))
    assert plan.symbols[symbol] == 3
    assert not plan.unresolved
    whole = plan.at(label_density=1)
    assert whole.symbols[symbol] == LABELS.numel()
    assert plan.at(batch=4).symbols[symbol] == 6
    counted = [row for row in plan.rows if symbol in row.saving_symbolic]
    assert counted
    larger = {row.config: row.saving_bytes for row in whole.rows}
    assert all(larger[row.config] > row.saving_bytes for row in counted)


def test_a_model_that_is_evaluated_has_no_plans(wrap):
    model = nn.Linear(4, 4)
    lab = wrap(model.eval())
    with torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(BuildError, match="no recompute plans"):
        lab.plan()


def test_a_model_without_opportunity_says_so(wrap):
    model = nn.Linear(4, 4)
    lab = wrap(model)
    model(torch.ones(2, 4)).sum().backward()
    plan = lab.plan()
    assert not plan.rows
    assert "ORT offers no recompute plan for this model" in text.render(plan)
    assert plan.table().empty
