"""Plain PyTorch with each layer checkpointed: the numbers are eager's bit for bit, and the model is left as it was."""

from __future__ import annotations

import copy

import pytest
import small_transformers
import torch
from torch import nn

import ortlab
from ortlab.engine.baselines import find_layers
from ortlab.errors import OptionError, StepError
from ortlab.render.lab_pages import status_note

SIZES = {"width": 16, "words": 40}


def bert():
    return small_transformers.bert(**SIZES, drop=0.1)


def llama():
    """Return a decoder, which makes a cache of keys and values also in training."""
    return small_transformers.llama(**SIZES, drop=0.1, use_cache=True)


def t5():
    return small_transformers.t5(**SIZES, drop=0.1, use_cache=True)


class Convolutions(nn.Module):
    """Layers with running statistics, which a second forward would update twice."""

    def __init__(self) -> None:
        super().__init__()
        layer = (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.2))
        self.layers = nn.Sequential(*(nn.Sequential(*copy.deepcopy(layer)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Trial:
    """A model with its batch; a step gives loss, gradients, buffers, random state and what was kept for backward."""

    def __init__(self, make) -> None:
        torch.manual_seed(3)
        self.model = make().train()
        ids = torch.randint(3, 40, (2, 6))
        self.batch = {"input_ids": ids, "labels": ids}
        if make is Convolutions:
            self.batch = {"x": torch.randn(2, 3, 4, 4)}
        self.start = copy.deepcopy(self.model.state_dict())

    def step(self):
        model = self.model
        model.load_state_dict(self.start)
        model.zero_grad()
        torch.manual_seed(5)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            outputs = model(**self.batch)
        loss = outputs.pow(2).mean() if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        numbers = [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]
        return [one.clone() for one in numbers], len(kept)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (bert, "2 BertLayer in bert.encoder.layer"),
        (llama, "2 LlamaDecoderLayer in model.layers"),
        (t5, "2 T5Block in encoder.block, 2 T5Block in decoder.block"),
        (Convolutions, "3 Sequential in layers"),
    ],
)
def test_numbers_are_those_of_eager_bit_for_bit_and_less_is_kept(make, layers, wrap):
    trial = Trial(make)
    lab = wrap(trial.model, engine="eager")
    expected, kept = trial.step()
    lab.set(engine="checkpoint")
    found, kept_now = trial.step()
    assert all(map(torch.equal, found, expected))
    assert kept_now < kept
    assert lab.status.detail == layers
    assert (lab.status.state, lab.status.executed_by) == ("ready", "checkpoint")
    assert status_note(lab.status).text == f"PyTorch, layers checkpointed ({layers}): ready."


def test_a_backward_that_is_repeated_adds_the_same_gradients(wrap):
    trial = Trial(Convolutions)
    wrap(trial.model, engine="checkpoint")
    loss = trial.model(**trial.batch).pow(2).mean()
    buffers = [one.clone() for one in trial.model.buffers()]
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in trial.model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * one) for p, one in zip(trial.model.parameters(), once, strict=True))
    assert all(map(torch.equal, trial.model.buffers(), buffers))


def test_the_model_is_as_it_was_between_calls_and_after_an_error():
    trial = Trial(bert)
    model = trial.model
    layer = model.bert.encoder.layer[0]
    layer.forward = own = layer.forward  # as accelerate puts one on the object
    names = [set(vars(part)) for part in model.modules()]
    lab = ortlab.wrap(model, engine="checkpoint")
    trial.step()

    def fail(*_):
        raise ZeroDivisionError

    hook = model.bert.encoder.layer[1].output.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        trial.step()
    hook.remove()
    assert vars(layer)["forward"] is own
    assert "forward" not in vars(model.bert.encoder.layer[1])
    lab.unwrap()
    assert [set(vars(part)) for part in model.modules()] == names


def test_transformers_own_checkpointing_does_not_recompute_a_second_time(wrap):
    trial = Trial(bert)
    model = trial.model
    enable = "activation_checkpointing_enable"  # its new name, which warns of the old one
    getattr(model, enable if hasattr(model, enable) else "gradient_checkpointing_enable")()
    calls = []
    hidden = model.bert.encoder.layer[0].intermediate
    hidden.register_forward_hook(lambda *_: calls.append(None))
    wrap(model, engine="checkpoint")
    trial.step()
    assert len(calls) == 2  # forward, and once more in the backward
    assert model.bert.encoder.layer[1].gradient_checkpointing


def test_nothing_is_checkpointed_without_gradients_and_a_filled_cache_is_refused(wrap):
    trial = Trial(llama)
    lab = wrap(trial.model, engine="checkpoint")
    ids = trial.batch["input_ids"]
    trial.model.eval()
    with torch.no_grad():
        words = trial.model.generate(ids, max_new_tokens=3, do_sample=False)
    cache = trial.model(ids, use_cache=True).past_key_values
    assert cache.get_seq_length() == ids.shape[1]
    lab.set(engine="eager")
    assert torch.equal(trial.model.generate(ids, max_new_tokens=3, do_sample=False), words)
    lab.set(engine="checkpoint")
    trial.model.train()
    with pytest.raises(StepError, match=r"given a filled cache(?s:.*)Train without past_key_values"):
        trial.model(ids, past_key_values=cache)


def test_a_model_without_repeated_layers_is_refused_and_modules_can_be_named(lab, experiment):
    lab.set(engine="eager").step(experiment.step, n=2)
    losses = lab.runs[-1].losses
    with pytest.raises(
        OptionError, match=r"no repeated layers(?s:.*)ModuleList or Sequential(?s:.*)hidden"
    ) as refused:
        lab.set(engine="checkpoint", memory_level=1)
    assert refused.value.fix.endswith('engine="checkpoint:hidden+dropout".')
    assert (lab.engine, lab.options.memory_level) == ("eager", 0)
    lab.set(engine="checkpoint: hidden + head")
    assert lab.engine == "checkpoint:hidden+head"
    assert lab.rerun().losses == losses
    assert lab.runs[-1].title == "#2 checkpoint:hidden+head"


def test_a_layer_that_stands_twice_in_a_list_is_checkpointed_once():
    shared, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleDict({"layers": nn.ModuleList([shared, shared, other])})
    for paths in ((), ("layers",)):
        (found,) = find_layers(model, paths)
        assert found.modules == (shared, other)


class Block(nn.Module):
    def __init__(self, width=4, more=1) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(width, width) for _ in range(more)), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def stage(count, width=4, more=1):
    return nn.Sequential(*(Block(width, more) for _ in range(count)))


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        # A model that is a list itself, with its blocks among other modules, in a row or not.
        (
            [nn.Embedding(9, 4), Block(), Block(), nn.LayerNorm(4), Block(), nn.Linear(4, 9)],
            ["3 Block in the model"],
        ),
        ([Block(), Block()], ["2 Block in the model"]),
        # Stages of blocks: the blocks, also those of a stage that has few parameters.
        ([nn.Linear(4, 4), stage(2), stage(3, 40), nn.Linear(4, 9)], ["2 Block in 1", "3 Block in 2"]),
        ([nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 4), *stage(2))})], ["2 Block in 0.body"]),
        # Nor are layers what repeats inside one.
        ([Block(more=3), nn.Linear(4, 4), Block(more=3)], ["2 Block in the model"]),
        # The only module of a list with most of the parameters, which a forward may call several times.
        (
            [nn.Linear(4, 4), nn.ModuleDict({"groups": nn.ModuleList([stage(1, 40)])})],
            ["Sequential 1.groups.0"],
        ),
    ],
)
def test_blocks_are_found_among_other_modules_and_where_the_model_is_the_list(modules, found):
    assert list(map(str, find_layers(nn.Sequential(*modules)))) == found


def test_linear_layers_between_activations_are_no_blocks():
    with pytest.raises(OptionError, match="beside others they count if they have parts"):
        find_layers(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()))


def test_a_lab_that_cannot_begin_with_it_gives_the_model_back():
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="no repeated layers"):
        ortlab.wrap(model, engine="checkpoint")
    assert type(model) is nn.Linear
    ortlab.wrap(model).unwrap()


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["bert.encoder.layer"], ["2 BertLayer in bert.encoder.layer"]),
        (["*.layer.1"], ["BertLayer bert.encoder.layer.1"]),
        (["cls", "bert.*.layer"], ["2 BertLayer in bert.encoder.layer", "BertOnlyMLMHead cls"]),
    ],
)
def test_paths_and_patterns_name_the_modules(paths, found):
    assert list(map(str, find_layers(bert(), paths))) == found


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["encoder"], "has no module 'encoder'"),
        (["bert.encoder", "bert.encoder.layer.0"], "have modules in common"),
    ],
)
def test_paths_that_lead_nowhere_or_meet_are_refused(paths, says):
    with pytest.raises(OptionError, match=says):
        find_layers(bert(), paths)
