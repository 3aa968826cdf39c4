"""Budgets of a small GPT-2: real sessions, measured peaks, and a lab that is afterwards as it was before."""

from __future__ import annotations

import pytest
import torch

import ortlab
from ortlab.errors import OptionError, StepError
from ortlab.render import text

MIB = 1 << 20


class Training:
    """A GPT-2 whose activations are much larger than its weights, and a step that can be told to fail."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(3)
        config = GPT2Config(
            n_layer=3,
            n_embd=64,
            n_head=4,
            vocab_size=96,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
            attn_pdrop=0.0,
        )
        self.model = GPT2LMHeadModel(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ids = torch.randint(3, 96, (12, 96))
        self.failing: BaseException | None = None
        self.calls = 0

    def step(self) -> torch.Tensor:
        self.calls += 1
        if self.failing is not None and self.calls > 12:
            raise self.failing
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> list[list[float]]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [
            tensor.tolist() for tensor in (*self.model.state_dict().values(), *moments, torch.get_rng_state())
        ]


@pytest.fixture(scope="module")
def training():
    training = Training()
    lab = ortlab.wrap(training.model, name="gpt2")
    optimizer = training.optimizer  # the step names it, so it is put back
    lab.step(lambda: (optimizer, training.step())[1], n=2, progress=False)
    training.lab = lab
    yield training
    lab.unwrap()


@pytest.fixture
def unchanged(training):
    """Hold the lab afterwards against what it was before."""
    lab = training.lab
    before = (training.state(), lab.configuration, lab.runs.table().to_csv())
    yield lab
    training.failing = None
    assert (training.state(), lab.configuration, lab.runs.table().to_csv()) == before


def predicted(lab):
    return lab.budget(saving=0.9, verify=False, progress=False)


def reachable(lab) -> int:
    """A limit half-way between the peak without plans and the lowest."""
    budget = predicted(lab)
    return int((budget.without.peak_bytes + budget.floor.peak_bytes) / 2)


def test_a_step_with_unnamed_nodes_is_budgeted():
    """The gradient of Llama's rotary embedding and norm has nodes to which ORT gives no name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        num_hidden_layers=3,
        hidden_size=64,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(3, 96, (12, 96))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    lab = ortlab.wrap(model, name="llama")
    try:
        lab.step(step, progress=False)
        assert not all(node.name for node in lab.profile().nodes)
        limit = reachable(lab)
        budget = lab.budget(limit, progress=False)
    finally:
        lab.unwrap()
    assert budget.outcome == "met"
    assert budget.best.peak_bytes <= limit


def test_a_budget_is_met_as_measured(unchanged):
    limit = reachable(unchanged)
    budget = unchanged.budget(limit, progress=False)
    assert budget.outcome == "met"
    assert budget.limit_bytes == limit
    assert budget.best.peak_bytes <= limit < budget.without.peak_bytes
    assert 0 < len(budget.trials) <= 3
    assert budget.plans
    assert not budget.applied
    assert abs(budget.best.error) < 0.02
    assert budget.obstacle is None
    assert unchanged.budgets[-1] is budget
    # The curve goes from no plans to the floor, and what is smaller costs more.
    peaks = [one.peak_bytes for one in budget.curve]
    costs = [one.cost_ms for one in budget.curve]
    assert (budget.curve[0].plans, peaks[-1]) == ((), budget.floor.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert costs[0] == 0 < costs[-1]
    assert ortlab.Budget.from_dict(budget.to_dict()) == budget
    assert len(ortlab.plot(budget).axes[0].lines) > 2


def test_what_cannot_be_reached_shows_the_closest_and_why(unchanged):
    budget = unchanged.budget("100 MiB", curve=False, progress=False)
    assert budget.outcome == "too small"
    assert budget.best.peak_bytes < budget.without.peak_bytes
    assert budget.obstacle.where.startswith("the ")
    assert budget.obstacle.bytes == pytest.approx(budget.floor.peak_bytes)
    sizes = [size for _, size in budget.obstacle.live]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0


def test_no_plans_are_chosen_where_none_are_needed(unchanged):
    for limit in ("100 GiB", int(1.05 * predicted(unchanged).without.peak_bytes)):
        budget = unchanged.budget(limit, curve=False, progress=False)
        assert (budget.outcome, budget.plans, budget.trials) == ("no plans needed", (), ())


def test_less_budget_never_needs_more_memory(unchanged):
    found = predicted(unchanged)
    top, floor = found.without.peak_bytes, found.floor.peak_bytes
    limits = [int(top - share * (top - floor)) for share in (0.25, 0.6, 0.9)]
    budgets = [unchanged.budget(limit, verify=False, curve=False, progress=False) for limit in limits]
    assert all(budget.outcome == "predicted to fit" for budget in budgets)
    peaks = [budget.prediction.peak_bytes for budget in budgets]
    costs = [budget.prediction.cost_ms for budget in budgets]
    assert peaks == sorted(peaks, reverse=True)
    assert costs == sorted(costs)


def test_plans_stay_on_where_that_is_asked_for(training):
    lab = training.lab
    before, runs = training.state(), len(lab.runs)
    budget = lab.budget(reachable(lab), apply=True, curve=False, progress=False)
    assert budget.applied
    assert lab.options.memory_plan == budget.plans != ()
    assert (training.state(), len(lab.runs)) == (before, runs)
    lab.set(memory_plan=[])


def test_plans_that_miss_are_not_left_on(unchanged):
    assert not unchanged.budget("100 MiB", apply=True, verify=False, progress=False).applied


@pytest.mark.parametrize("failure", [RuntimeError("the data ran out"), KeyboardInterrupt()])
def test_a_failure_leaves_everything_as_it_was(training, unchanged, failure):
    limit, count = reachable(unchanged), len(unchanged.budgets)
    training.calls, training.failing = 10, failure
    with pytest.raises(type(failure)):
        unchanged.budget(limit, progress=False)
    assert len(unchanged.budgets) == count


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "neither"),
        ({"limit": "6 GX"}, "GX"),
        ({"limit": 0}, "budget is 0"),
        ({"limit": "6 GiB", "saving": 0.2}, "both"),
        ({"saving": 1.5}, "below 1"),
    ],
)
def test_a_budget_that_makes_no_sense_runs_nothing(training, unchanged, asked, said):
    calls = training.calls
    with pytest.raises(OptionError, match=said):
        unchanged.budget(**asked)
    assert training.calls == calls


def test_plans_are_for_onnx_runtime(training):
    lab = training.lab.set(engine="eager")
    try:
        with pytest.raises(OptionError, match="no recompute plans for engine 'eager'"):
            lab.budget("6 GiB")
        assert lab.engine == "eager"
    finally:
        lab.set(engine="ort")


def test_there_has_to_be_a_step(lab):
    with pytest.raises(StepError, match="no step to go back to"):
        lab.budget("6 GiB")


def test_a_model_without_plans_says_so():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    lab = ortlab.wrap(model)
    x = torch.randn(3, 4)
    lab.step(lambda: model(x).sum().backward(), progress=False)
    budget = lab.budget(saving=0.5, progress=False)
    assert (budget.outcome, budget.plans, budget.solver.plans) == ("too small", (), 0)
    assert "There is no recompute plan for this model" in text.render(budget)
    lab.unwrap()
