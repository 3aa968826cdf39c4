"""%ort_wrap --recipe writes a cell for the user's own names; what a CPU can run of it is run."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import nn

import ortlab
from ortlab.checks.recipes import RECIPES
from ortlab.engine.installation import have
from ortlab.errors import OptionError
from ortlab.lab.lab import Lab
from ortlab.options.options import Need
from ortlab.render import text

SETUP = """
import torch
from torch import nn
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
other = nn.Linear(2, 2)
other_adam = torch.optim.AdamW(other.parameters(), lr=1.0)
inputs, targets = torch.randn(5, 3), torch.randn(5, 2)
"""
TRAIN = """
def train():
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    adam.step()
    adam.zero_grad()
    return loss
"""


@pytest.fixture
def recipe_shell(shell):
    shell.run(SETUP)
    yield shell
    for held in list(shell.user_ns.values()):
        if isinstance(held, Lab):
            held.unwrap()


@pytest.mark.row("G4")
def test_the_cell_of_fused_adam_trains_as_the_users_adamw_did(recipe_shell):
    recipe_shell.run(
        "adam = torch.optim.AdamW(net.parameters(), lr=0.02, betas=(0.8, 0.99), weight_decay=0.1)"
    )
    recipe_shell.run(TRAIN)
    net = recipe_shell.user_ns["net"]
    start = {name: value.clone() for name, value in net.state_dict().items()}
    recipe_shell.run("before = [train().item() for _ in range(4)]")
    net.load_state_dict(start)

    made = recipe_shell.run("%ort_wrap net --recipe fused_adam")
    assert recipe_shell.rl_next_input == made.code
    assert "lab" not in recipe_shell.user_ns
    recipe_shell.run(made.code)
    run = recipe_shell.user_ns["lab"].step(recipe_shell.user_ns["train"], n=4, progress=False)

    assert run.executed_by == "ort"
    assert run.optimizers[0].startswith("FusedAdam by PyTorch's fused kernel")
    assert list(run.losses) == pytest.approx(recipe_shell.user_ns["before"], rel=1e-5)


@pytest.mark.row("G4")
def test_several_groups_keep_their_own_numbers(recipe_shell):
    recipe_shell.run(
        "groups = [{'params': net[0].parameters(), 'lr': 0.5}, {'params': net[2].parameters(), 'weight_decay': 0.0}]\n"
        "adam = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)"
    )
    made = recipe_shell.run("%ort_wrap net --recipe fused_adam")
    recipe_shell.run(made.code)
    groups = recipe_shell.user_ns["adam"].param_groups
    assert type(recipe_shell.user_ns["adam"]).__name__ == "FusedAdam"
    assert [(one["lr"], one["weight_decay"], len(one["params"])) for one in groups] == [
        (0.5, 0.1, 2),
        (0.02, 0.0, 2),
    ]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_every_recipe_is_python_that_defines_what_it_uses(name, with_optimizer, wrapped):
    net = nn.Linear(2, 2)
    like = torch.optim.AdamW(net.parameters()) if with_optimizer else None
    made = ortlab.recipe(name, model="trainer.net", optimizer="adam", like=like, wrapped=wrapped)
    tree = ast.parse(made.code)
    imported = {
        (alias.asname or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    stored = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    given = {"trainer", "adam"} if with_optimizer else {"trainer"}
    assert read - imported - stored - given == {"batch"} & read
    assert imported <= read  # nothing is imported for nothing
    assert ("ortlab.wrap(" in made.code) != wrapped
    if not wrapped and name in {"deepspeed", "all"}:
        assert made.code.index("ortlab.wrap(") < made.code.index("deepspeed.initialize(")
    if not wrapped and name == "apex":
        assert made.code.index("amp.initialize(") < made.code.index("ortlab.wrap(")


def test_a_library_that_is_missing_is_said_with_its_command():
    made = ortlab.recipe("all")
    library, *gpu = made.missing
    assert library == "deepspeed is not installed: pip install 'deepspeed<=0.9.2'."
    assert bool(gpu) == (Need.CUDA not in have())
    assert all(one.startswith("Training in float16 needs an NVIDIA GPU") for one in gpu)
    assert (
        ortlab.recipe("apex")
        .missing[0]
        .startswith("apex is not installed: build it with its CUDA extensions")
    )
    for said in made.missing:
        assert said in " ".join(text.render(made).split())
    assert made.code.strip() in text.render(made)
    assert ortlab.recipe("fused_adam").missing == ()
    with pytest.raises(ModuleNotFoundError, match="deepspeed"):
        exec(made.code, {"model": nn.Linear(2, 2)})  # noqa: S102 - the cell, as a user without DeepSpeed runs it


def test_l2_of_adam_says_what_is_not_the_same():
    net = nn.Linear(2, 2)
    made = ortlab.recipe("fused_adam", like=torch.optim.Adam(net.parameters(), weight_decay=0.1))
    assert "adam_w_mode=0" in made.code
    assert "in torch after it" in made.code
    assert "adam_w_mode=2" in ortlab.recipe("fused_adam", like=torch.optim.Adam(net.parameters())).code


def test_what_fused_adam_cannot_stand_for_is_refused():
    held = list(nn.Linear(2, 2).parameters())
    with pytest.raises(OptionError, match="a SGD"):
        ortlab.recipe("all", like=torch.optim.SGD(held, lr=1.0))
    with pytest.raises(OptionError, match="no amsgrad"):
        ortlab.recipe("fused_adam", like=torch.optim.AdamW(held, amsgrad=True))
    assert "SGD" not in ortlab.recipe("deepspeed", like=torch.optim.SGD(held, lr=1.0)).code


def test_a_wrapped_model_is_not_wrapped_again(net_shell):
    made = net_shell.run("%ort_wrap net --recipe fused_adam")
    assert "ortlab.wrap" not in made.code
    net_shell.run(made.code)
    assert type(net_shell.user_ns["optimizer"]).__name__ == "FusedAdam"
