"""Long attention as one call of PyTorch's kernel: which is taken, and that it trains as PyTorch does."""
# ruff: noqa: ARG005 - all forms of attention are given the same

import copy
import math

import pytest
import small_transformers
import torch
import torch.nn.functional as F
from torch import nn

from ortlab.engine.operators import long_attention

pytestmark = pytest.mark.filterwarnings("ignore:Setting `training` to something:DeprecationWarning")

BATCH, LENGTH, HEADS, WIDTH = 2, 48, 4, 32


@pytest.fixture
def short_is_long(monkeypatch):
    """Let tests take attention that computes in no time."""
    for least in ("LONG", "LONG_CAUSAL"):
        monkeypatch.setattr(long_attention, least, LENGTH)


class Attending(nn.Module):
    """A layer whose attention some function computes from query, key, value and a mask."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.projected = nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = nn.Linear(WIDTH, 8)
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

    def forward(self, x, mask):
        parts = self.projected(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = self.attend(self, *parts, mask)
        attended, *others = attended if isinstance(attended, tuple) else (attended,)
        mixed = self.mixed(attended.transpose(1, 2).flatten(2))
        return (mixed, *others) if others else mixed


def scores(query, key):
    return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])


def causal(length):
    return torch.tril(torch.ones(length, length, dtype=torch.bool))


def everywhere(mask):
    return mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)


def masked_out(model, query, key, value, mask):
    """Mask as nanoGPT does."""
    hidden = scores(query, key).masked_fill(~causal(query.shape[2]), float("-inf"))
    return F.softmax(hidden, dim=-1) @ value


def added(model, query, key, value, mask):
    """Mask as BERT does, with a number that is almost infinite."""
    bias = (1.0 - everywhere(mask).to(query.dtype)) * torch.finfo(query.dtype).min
    return nn.Softmax(-1)(scores(query, key) + bias) @ value


def as_in_transformers(query, key, value, dropout):
    weights = (query @ key.transpose(2, 3)) * 0.4 + torch.full((1, 1, LENGTH, LENGTH), -9e37).triu(1)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout, training=True) @ value


sdpa = F.scaled_dot_product_attention
TAKEN = {
    "sdpa": lambda model, q, k, v, mask: sdpa(q, k, v),
    "sdpa, causal": lambda model, q, k, v, mask: sdpa(q, k, v, is_causal=True),
    "sdpa, one more than causal": lambda model, q, k, v, mask: sdpa(
        q, k, v, attn_mask=torch.where(torch.ones(LENGTH, LENGTH).tril(1) == 0, -torch.inf, 0.0)
    ),
    "sdpa, behind instead of before": lambda model, q, k, v, mask: sdpa(
        q, k, v, attn_mask=torch.where(torch.ones(q.shape[2], q.shape[2]).tril() == 1, 0.0, -torch.inf).T
    ),
    "sdpa, padding": lambda model, q, k, v, mask: sdpa(q, k, v, attn_mask=everywhere(mask)),
    "sdpa, scale": lambda model, q, k, v, mask: sdpa(q, k, v, scale=0.3),
    "sdpa, a bias of distances": lambda model, q, k, v, mask: sdpa(
        q, k, v, attn_mask=torch.arange(q.shape[2]).neg().float().expand(q.shape[2], -1) / 50
    ),
    "written out": lambda model, q, k, v, mask: torch.softmax(scores(q, k), -1) @ v,
    "written out, scaled twice": lambda model, q, k, v, mask: torch.softmax(scores(q * 0.5, k) * 3.0, -1) @ v,
    "written out, keys turned in one go and scaled": lambda model, q, k, v, mask: (
        torch.softmax(q @ (k.transpose(1, 2).permute(0, 2, 3, 1) * 0.4 / torch.tensor(1.5)), -1) @ v
    ),
    "written out, as in transformers": lambda model, q, k, v, mask: as_in_transformers(q, k, v, 0.0),
    "written out, masked_fill": masked_out,
    "written out, causal": lambda model, q, k, v, mask: (
        scores(q, k).masked_fill(torch.ones(q.shape[2], q.shape[2]).tril() == 0, -torch.inf).softmax(-1) @ v
    ),
    "written out, added mask": added,
    "written out, chosen": lambda model, q, k, v, mask: (
        torch.where(everywhere(mask), scores(q, k), torch.tensor(-torch.inf)).softmax(-1) @ v
    ),
}
LEFT = {
    "dropout": lambda model, q, k, v, mask: sdpa(q, k, v, dropout_p=0.5),
    "dropout, written out": lambda model, q, k, v, mask: as_in_transformers(q, k, v, 0.5),
    "a learned bias": lambda model, q, k, v, mask: sdpa(q, k, v, attn_mask=model.bias),
    "probabilities that are returned": lambda model, q, k, v, mask: (
        (p := scores(q, k).softmax(-1)) @ v,
        p,
    ),
    "one head of keys": lambda model, q, k, v, mask: scores(q, k[:, :1]).softmax(-1) @ v[:, :1],
    "softmax of another axis": lambda model, q, k, v, mask: scores(q, k).softmax(-2) @ v,
    "a mask that leaves some of a score": lambda model, q, k, v, mask: (
        scores(q, k).masked_fill(~everywhere(mask), -20.0).softmax(-1) @ v
    ),
    "values of another width": lambda model, q, k, v, mask: (
        scores(q, k).softmax(-1) @ torch.cat([v, v], -1)
    )[..., : v.shape[-1]],
}


def padded():
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[1, LENGTH // 2 :] = False
    return mask


def train(model, *args):
    output = model(*args)
    output = output[0] if isinstance(output, tuple) else output
    loss = output.square().mean()
    loss.backward()
    return loss


def operators(lab):
    return [node.operator for node in lab.profile(n=1, progress=False).nodes]


def assert_same_gradients(model, eager):
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", TAKEN)
def test_long_attention_is_one_call_and_trains_as_pytorch(case, short_is_long, wrap):
    torch.manual_seed(1)
    eager = Attending(TAKEN[case])
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    x, mask = torch.randn(BATCH, LENGTH, WIDTH), padded()
    lab.step(lambda: train(model, x, mask), n=1, memory=False, progress=False)
    train(eager, x, mask)
    assert_same_gradients(model, eager)
    used = operators(lab)
    assert "ortlab::attention" in used
    assert "ortlab::attention_backward" in used
    unknown = {one.operator: one.output for one in lab.activations().unknown}
    assert unknown in ({}, {"ortlab::attention": 2})  # whether a mask is causal is seen when it runs
    assert not [name for name in used if "oftmax" in name]
    lab.set(aten_backward=False).rerun(memory=False, progress=False)
    assert "Softmax" in operators(lab)
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("case", LEFT)
def test_what_torch_has_no_kernel_for_stays_in_pieces(case, short_is_long, wrap):
    torch.manual_seed(1)
    model = Attending(LEFT[case])
    lab = wrap(model, log_level="ERROR")
    x, mask = torch.randn(BATCH, LENGTH, WIDTH), padded()
    lab.step(lambda: train(model, x, mask), n=1, memory=False, progress=False)
    used = operators(lab)
    assert "ortlab::attention" not in used
    assert "Softmax" in used


@pytest.mark.parametrize("case", ["sdpa, causal", "written out, causal"])
def test_of_attention_that_the_graph_says_is_causal_no_mask_is_made(case, short_is_long, wrap):
    model = Attending(TAKEN[case])
    lab = wrap(model, log_level="ERROR")
    x, mask = torch.randn(BATCH, LENGTH, WIDTH), padded()
    lab.step(lambda: train(model, x, mask), n=1, memory=False, progress=False)
    used = operators(lab)
    assert "ortlab::attention" in used
    assert {"Trilu", "Equal", "Where", "ortlab::where", "Mul", "Softmax"}.isdisjoint(used)
    assert not lab.activations().unknown


@pytest.mark.parametrize(("case", "least"), [("sdpa", "LONG"), ("sdpa, causal", "LONG_CAUSAL")])
def test_short_attention_stays_in_pieces_and_long_is_taken(case, least, wrap):
    longest = getattr(long_attention, least)
    for length, taken in ((longest - 1, False), (longest, True)):
        model = Attending(TAKEN[case])
        lab = wrap(model, log_level="ERROR")
        x, mask = torch.randn(1, length, WIDTH), torch.ones(1, length, dtype=torch.bool)
        lab.step(lambda: train(model, x, mask), n=1, memory=False, progress=False)  # noqa: B023
        assert ("ortlab::attention" in operators(lab)) == taken
        lab.unwrap()


def test_a_position_that_sees_nothing_is_no_number_as_in_pytorch(short_is_long, wrap):
    def attend(model, query, key, value, mask):
        bias = torch.where(mask[:, None, :, None], 0.0, -torch.inf)
        return (scores(query, key) + bias).softmax(-1) @ value

    torch.manual_seed(1)
    eager = Attending(attend)
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    x, mask = torch.randn(BATCH, LENGTH, WIDTH), padded()
    run = lab.step(lambda: train(model, x, mask), n=1, memory=False, progress=False)
    assert train(eager, x, mask).isnan()
    assert math.isnan(run.losses[0])
    assert_same_gradients(model, eager)
    query, key, value, grad = (torch.randn(1, 2, 5, 4) for _ in range(4))
    bias = torch.zeros(1, 1, 5, 5)
    bias[0, 0, 2] = bias[0, 0, :, 4] = -torch.inf
    leaves = [one.clone().requires_grad_() for one in (query, key, value)]
    expected = (scores(*leaves[:2]) + bias).softmax(-1) @ leaves[2]
    found = long_attention.attention(query, key, value, bias, 0.5)
    torch.testing.assert_close(found[0], expected.detach(), equal_nan=True)
    gradients = long_attention.attention_backward(grad, query, key, value, *found, 0.5)
    for one, other in zip(gradients, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("never", [-torch.inf, -1.7e38])
def test_of_a_causal_mask_nothing_is_kept(never):
    query, key, value = (torch.randn(2, 2, 6, 4) for _ in range(3))
    mask = torch.full((2, 1, 6, 6), never).triu(1)
    found = long_attention.attention(query, key, value, mask, 0.5)
    expected = long_attention.attention(query, key, value, mask.where(mask == 0, -100.0), 0.5)
    torch.testing.assert_close(found[0], expected[0])
    assert (found[2].shape, expected[2].shape) == ((0,), mask.shape)
    mask[1, 0, 5, 2] = never
    *_, kept = long_attention.attention(query, key, value, mask, 0.5)
    assert torch.equal(kept, mask)


@pytest.mark.parametrize(
    ("length", "shape"),
    [(6, (2, 1, 1, 6)), (6, (1, 3, 6, 6)), (6, (6, 1)), (6, (1, 1, 1, 1)), (1, (2, 1, 1, 1)), (1, (1, 1))],
)
def test_a_mask_may_be_broadcast(length, shape):
    torch.manual_seed(1)
    leaves = [torch.randn(2, 3, length, 4, requires_grad=True) for _ in range(3)]
    mask, grad = torch.randn(shape), torch.randn(2, 3, length, 4)
    expected = (scores(*leaves[:2]) + mask).softmax(-1) @ leaves[2]
    query, key, value = (one.detach() for one in leaves)
    found = long_attention.attention(query, key, value, mask, 0.5)
    torch.testing.assert_close(found[0], expected.detach())
    gradients = long_attention.attention_backward(grad, query, key, value, *found, 0.5)
    for one, other in zip(gradients, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def llama():
    torch.manual_seed(1)
    return small_transformers.llama(heads=4, num_key_value_heads=2)


def test_a_llama_trains_with_padding_and_without_in_one_graph(short_is_long, wrap):
    eager = llama()
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    batch = small_transformers.batch_of(BATCH, LENGTH)
    digests = []
    for mask in (torch.ones(BATCH, LENGTH, dtype=torch.long), padded().long()):
        for one in (model, eager):
            one.zero_grad()
            one(attention_mask=mask, **batch).loss.backward()
        assert_same_gradients(model, eager)
        digests.append(lab.graph("execution").digest)
    assert digests[0] == digests[1]
    assert "org.pytorch.aten.ATen" in lab.graph("execution").operators


def test_layers_with_long_attention_can_be_recomputed(short_is_long, wrap):
    model = llama()
    lab = wrap(model, log_level="ERROR")
    step = small_transformers.step_of(model, small_transformers.batch_of(BATCH, LENGTH))
    lab.step(step, n=1, memory=False, progress=False)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    lab.set(recompute="layers")
    lab.step(step, n=1, memory=False, progress=False)
    used = operators(lab)
    assert used.count("ortlab::attention") == 2 * 2
    assert used.count("ortlab::attention_backward") == 2
    assert all(
        torch.equal(one, parameter.grad) for one, parameter in zip(before, model.parameters(), strict=True)
    )
