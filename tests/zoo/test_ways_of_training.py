"""Each way of training with a wrapped model against the same way with PyTorch."""

from __future__ import annotations

import copy
import gc

import pytest
import small_transformers
import torch
from torch import nn

from ortlab.errors import BuildError, ExecutionError

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
]

TOLERANCE = 1e-5


class Net(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.b(self.dropout(torch.tanh(self.a(x))))


class Scored(nn.Module):
    """A body, its softmax cross entropy with smoothed labels, and two outputs."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x, y):
        scores = self.body(x)
        return self.criterion(scores, y), scores


def gpt2(**settings):
    more = {"bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM"}
    return small_transformers.gpt2(layers=1, heads=4, words=100, **more | settings)


def bert():
    return small_transformers.bert(layers=1, heads=4, words=100)


def text(rows, length, padded=0):
    """Return a batch whose last rows are shorter, as with padding="longest"."""
    ids = torch.randint(5, 100, (rows, length))
    mask = torch.ones_like(ids)
    mask[1:, length - padded :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def worst(expected, actual):
    """Return the largest difference, relative to each tensor's largest entry or to 1 % of the largest of all."""
    assert expected.keys() == actual.keys()
    floor = 1e-2 * max(one.abs().max().item() for one in expected.values())
    return max(
        ((one.double() - actual[name].double()).abs().max() / max(one.abs().max().item(), floor)).item()
        for name, one in expected.items()
    )


def gradients(module):
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


@pytest.fixture
def pair(wrap):
    """Return a function that gives a model twice, the second wrapped, with the lab and a list of its builds."""

    def make(model, **options):
        torch.manual_seed(1)
        reference = copy.deepcopy(model)
        lab = wrap(model, **options)
        built, tell = [], lab._bench.ort._on_built

        def note(done):
            built.append(done.stage)
            tell(done)

        lab._bench.ort._on_built = note
        return reference, model, lab, built

    torch.manual_seed(0)
    return make


# --- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, gpt2])
def test_batches_padded_to_their_longest_row_need_no_other_export(make, pair):
    reference, model, lab, built = pair(make().train())
    for rows, length in ((4, 12), (4, 7), (2, 16), (3, 9), (2, 5)):  # the last one as at the end of an epoch
        batch = text(rows, length, padded=2)
        for one in (reference, model):
            one.zero_grad()
            one(**batch).loss.backward()
        assert worst(gradients(reference), gradients(model)) <= TOLERANCE
        assert lab.status.executed_by == "ort"
    assert built == ["export"]
    assert not [message for message in lab.messages if "anew" in message.text]


def test_batches_of_one_have_an_export_of_their_own_which_is_said_once(pair):
    reference, model, lab, built = pair(gpt2().train())
    for rows, length in ((3, 6), (1, 8), (2, 9), (1, 4), (4, 4)):
        batch = text(rows, length)
        for one in (reference, model):
            one.zero_grad()
            one(**batch).loss.backward()
        assert worst(gradients(reference), gradients(model)) <= TOLERANCE
    assert built == ["export", "export"]
    assert len([message for message in lab.messages if "anew" in message.text]) == 1


# --- forward and backward ------------------------------------------------------------------------------------------


def test_one_backward_for_unlike_calls_of_one_model(pair):
    """A contrastive loss; and one of the calls is with a single row, which has a session of its own."""
    reference, model, _, built = pair(Net())
    x, y, z = torch.randn(4, 8), torch.randn(4, 8), torch.randn(1, 8)
    for one in (reference, model):
        similar = nn.functional.cosine_similarity(one(x), one(y)).sum()
        (similar + one(z).pow(2).sum()).backward()
    assert worst(gradients(reference), gradients(model)) <= TOLERANCE
    assert built == ["export", "export"]


def live(name):
    """Count the objects of a class."""
    gc.collect()
    return sum(type(thing).__name__ == name for thing in gc.get_objects())


def test_forwards_without_backward_keep_nothing(pair):
    _, model, _, _ = pair(Net())
    before = live("_Pass")  # what ORT keeps of a forward for its backward
    held = [model(torch.randn(2, 8)) for _ in range(3)]
    copies = [one.detach().clone() for one in held]
    assert live("_Pass") == before + 3
    for _ in range(20):
        model(torch.randn(2, 8))
    assert live("_Pass") == before + 3
    assert all(map(torch.equal, held, copies)), "an output that is held is not overwritten"
    del held
    assert live("_Pass") == before


def test_a_second_backward_is_refused_by_name(pair):
    _, model, _, _ = pair(Net())
    loss = model(torch.randn(2, 8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ExecutionError, match="a second time") as caught:
        loss.backward()
    assert "engine='eager'" in caught.value.fix
    model(torch.randn(2, 8)).sum().backward()


def test_a_gradient_penalty_is_refused_and_not_left_out(pair):
    reference, model, lab, _ = pair(Net())
    x = torch.randn(2, 8, requires_grad=True)

    def loss(one):
        score = one(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + slope.pow(2).sum()

    with pytest.raises(ExecutionError, match="gradient of a gradient"):
        loss(model).backward()
    lab.set(engine="eager")
    for one in (reference, model):
        one.zero_grad()
        loss(one).backward()
    assert worst(gradients(reference), gradients(model)) == 0


def step_between(module, _x, _output):
    torch.optim.SGD(module.parameters(), lr=1.0).step()


def write_batch(_module, x, _output):
    x.zero_()


def write_output(_module, _x, output):
    with torch.no_grad():
        output[0].mul_(2)


class Twice(Net):
    """Two outputs that the backward reads both."""

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        return hidden, torch.sigmoid(self.b(hidden))


@pytest.mark.parametrize("write", [step_between, write_batch, write_output])
def test_what_is_written_to_between_forward_and_backward_is_refused_as_in_pytorch(write, pair):
    reference, model, _, _ = pair(Twice())
    for one, error in ((reference, RuntimeError), (model, ExecutionError)):
        x = torch.randn(2, 8)
        sum(part.sum() for part in one(x)).backward()
        output = one(x)
        write(one, x, output)
        with pytest.raises(error, match=r"inplace|Written to between"):
            sum(part.sum() for part in output).backward()
        with pytest.raises(error, match=r"second time|Written to between"):
            sum(part.sum() for part in output).backward()


@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_backward_reads_what_pytorchs_backward_reads(make, pair):
    reference, model, lab, _ = pair(make().train())
    batch = text(2, 6)
    model(**batch).loss.backward()
    ours = {
        name.removeprefix("_original_module.") for name in lab._bench.ort.execution._manager._known_reads[2]
    }
    theirs = set()
    for name, parameter in reference.named_parameters():
        loss = reference(**batch).loss
        with torch.no_grad():
            parameter.mul_(1.0)
        try:
            loss.backward()
        except RuntimeError:
            theirs.add(name)
    parameters = {name for name, _ in reference.named_parameters()}
    assert ours & parameters <= theirs
    # Autograd keeps the bias of a layer normalisation, and reads its shape only.
    assert all("bias" in name and "ln_" in name.replace("LayerNorm", "ln_") for name in theirs - ours)


# --- optimizers ------------------------------------------------------------------------------------------------------


OPTIMIZERS = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "Adam foreach": lambda groups: torch.optim.Adam(groups, lr=0.01, eps=1e-3, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-3, fused=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, eps=1e-3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_schedules_groups_clipping_and_accumulation(kind, pair):
    reference, model, _, built = pair(Scored(Net()))
    batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(6)]
    for one in (reference, model):
        groups = [
            {"params": list(one.body.a.parameters()), "weight_decay": 0.1},
            {"params": list(one.body.b.parameters()), "lr": 0.02},
        ]
        optimizer = OPTIMIZERS[kind](groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        for number, (x, y) in enumerate(batches):
            (one(x, y)[0] / 2).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=number % 4 == 1)
    assert worst(dict(reference.named_parameters()), dict(model.named_parameters())) <= TOLERANCE
    assert built == ["export"]


def test_accumulated_gradients_are_the_sum_to_the_bit(pair):
    _, model, _, _ = pair(Net())
    batches = [torch.randn(4, 8) for _ in range(3)]
    single = []
    for x in batches:
        model.zero_grad()
        model(x).pow(2).sum().backward()
        single.append(gradients(model))
    model.zero_grad()
    for x in batches:
        model(x).pow(2).sum().backward()
    for name, total in gradients(model).items():
        assert torch.equal(total, single[0][name] + single[1][name] + single[2][name])


def test_a_gan_whose_networks_are_frozen_in_turn(pair):
    torch.manual_seed(0)
    critic = pair(nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, 1)))
    maker = pair(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)))
    entropy = nn.functional.binary_cross_entropy_with_logits
    for judge, make in ((critic[0], maker[0]), (critic[1], maker[1])):
        torch.manual_seed(2)
        steps = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (judge, make)]
        for _ in range(4):
            real, noise = torch.randn(5, 4), torch.randn(5, 3)
            judge.requires_grad_(True)
            steps[0].zero_grad()
            false = entropy(judge(make(noise).detach()), torch.zeros(5, 1))
            (entropy(judge(real), torch.ones(5, 1)) + false).backward()
            steps[0].step()
            judge.requires_grad_(False)
            steps[1].zero_grad()
            entropy(judge(make(noise)), torch.ones(5, 1)).backward()
            steps[1].step()
    for reference, model, *_ in (critic, maker):
        assert worst(dict(reference.named_parameters()), dict(model.named_parameters())) <= TOLERANCE
    assert critic[3] == ["export", "export"], "each of the two steps is built once"
    assert maker[3] == ["export"]


def test_weights_that_are_loaded_averaged_and_tied(pair):
    reference, model, _, built = pair(gpt2().train())
    saved = copy.deepcopy(gpt2().state_dict())
    batch = text(2, 6)
    averages = []
    for one in (reference, model):
        average = copy.deepcopy(one)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in range(5):
            optimizer.zero_grad()
            one(**batch).loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), one.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
            if number == 2:
                one.load_state_dict(saved)
            if number == 3:
                one.transformer.wpe.weight.data = one.transformer.wpe.weight.data * 2
        assert one.lm_head.weight is one.transformer.wte.weight
        averages.append(dict(average.named_parameters()))
    assert worst(dict(reference.named_parameters()), dict(model.named_parameters())) <= TOLERANCE
    assert worst(*averages) <= TOLERANCE
    assert built == ["export"]


def elsewhere(weight):
    weight.data = weight.data * 2


def turned(weight):
    weight.data = weight.data.t()  # the same memory and sizes, other strides


def shared(weight):
    weight.set_(torch.full_like(weight, 0.5))


def written(weight):
    weight.detach().numpy()[0] = 2.0


def freed_and_filled(weight):
    values = weight.detach().clone()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(values.nbytes)
    weight.copy_(values * 3)


def swapped(weight):
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))


@pytest.mark.parametrize("move", [elsewhere, turned, shared, written, freed_and_filled, swapped])
def test_a_step_reads_a_weight_where_it_is_by_then(move, pair):
    reference, model, _, built = pair(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
    x = torch.randn(4, 6)
    for _ in range(3):
        for one in (reference, model):
            one.zero_grad()
            one(x).square().sum().backward()
        assert worst(gradients(reference), gradients(model)) <= TOLERANCE
        for one in (reference, model):
            with torch.no_grad():
                move(one[0].weight)
    assert built == ["export"]


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_of_training(quiet, pair):
    reference, model, lab, built = pair(Net(dropout=0.0))
    x = torch.randn(4, 8)
    for _ in range(2):
        for one in (reference, model):
            one.train()
            one.zero_grad()
            one(x).pow(2).sum().backward()
        assert worst(gradients(reference), gradients(model)) <= TOLERANCE
        for one in (reference, model):
            one.eval()
        with quiet():
            expected, actual = reference(x), model(x)
        torch.testing.assert_close(actual, expected)
        assert not actual.requires_grad
        assert actual.is_inference() == expected.is_inference()
        assert lab.status.executed_by == "ort"
    assert built == ["export", "export"]


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_a_first_call_without_gradients_costs_later_calls_none(quiet, pair):
    """In train mode, as for a look at the loss before training, on a batch that was made in that mode as well."""
    reference, model, lab, _ = pair(Net(dropout=0.0))
    with quiet():
        early = torch.randn(4, 8)
        torch.testing.assert_close(model(early), reference(early))
        assert lab.status.executed_by == "ort"
    x = torch.randn(4, 8)
    for one in (reference, model):
        one(x).pow(2).sum().backward()
    assert lab.status.executed_by == "ort"
    assert worst(gradients(reference), gradients(model)) <= TOLERANCE


def test_gradients_in_eval_mode_are_those_of_pytorch(pair):
    """As for a saliency map, or where the whole model is kept in eval to leave statistics alone."""
    reference, model, lab, built = pair(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    for mode in (True, False, True, False):
        x = torch.randn(5, 8, requires_grad=True)
        for one in (reference, model):
            one.train(mode)
            one.zero_grad()
        if mode:
            model(x).sum().backward()
            reference(x).sum().backward()
            reference.load_state_dict(model.state_dict())
            continue
        slopes = []
        for one in (reference, model):
            one(x).pow(2).sum().backward()
            slopes.append(x.grad.clone())
            x.grad = None
        torch.testing.assert_close(slopes[1], slopes[0])
        assert worst(gradients(reference), gradients(model)) <= TOLERANCE
    assert lab.status.executed_by == "ort"
    assert built == ["export", "export"]


def test_generation_after_training_and_training_after_it(pair):
    reference, model, lab, built = pair(gpt2().train())
    batch = text(2, 6)
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    told = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, model)]
    words = []
    for one, optimizer in zip((reference, model), optimizers, strict=True):
        one(**batch).loss.backward()
        optimizer.step()
        words.append(one.eval().generate(**prompt, **told, use_cache=False))
    assert torch.equal(*words)
    assert lab.status.executed_by == "ort"
    with pytest.raises(BuildError, match="past_key_values") as caught:
        model.generate(**prompt, **told, use_cache=True)
    assert "use_cache=False" in caught.value.fix
    lab.set(engine="eager")
    assert torch.equal(words[0], model.generate(**prompt, **told, use_cache=True))
    lab.set(engine="ort")
    for one in (reference, model):
        one.train().zero_grad()
        one(**batch).loss.backward()
    assert worst(gradients(reference), gradients(model)) <= TOLERANCE
    assert built == ["export", "export"]


class Chooses(nn.Module):
    """Asks for the type of a number that it is called with."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, last):
        rows = slice(-last, None) if isinstance(last, int) else last
        return self.linear(x[:, rows])


def test_a_number_is_a_number_in_the_trace(pair):
    reference, model, _, _ = pair(Chooses())
    x = torch.randn(2, 5, 4)
    for last in (1, 2):
        torch.testing.assert_close(model(x, last), reference(x, last))


# --- what does not go through a graph --------------------------------------------------------------------------------


# What torch says of itself when it first differentiates forward.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["grad", "vmap", "dual"])
def test_transforms_of_functions_are_refused_by_name(transform, pair):
    _, model, _, _ = pair(Net())
    x = torch.randn(3, 8)

    def dual():
        with torch.autograd.forward_ad.dual_level():
            return model(torch.autograd.forward_ad.make_dual(x, x))

    calls = {
        "grad": lambda: torch.func.grad(lambda value: model(value).sum())(x),
        "vmap": lambda: torch.vmap(model)(x),
        "dual": dual,
    }
    model(x)
    with pytest.raises(ExecutionError, match="called inside"):
        calls[transform]()
    model(x).sum().backward()


def test_other_weights_for_one_call(pair):
    reference, model, lab, _ = pair(Net())
    x = torch.randn(3, 8)
    model(x)
    doubled = {name: weight.detach() * 2 for name, weight in model.named_parameters()}
    expected = torch.func.functional_call(reference, doubled, (x,))
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (x,)), expected)
    torch.testing.assert_close(model(x), reference(x))
    assert lab.status.executed_by == "ort"
