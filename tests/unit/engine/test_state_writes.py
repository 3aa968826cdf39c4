"""What a forward writes into buffers and parameters stands there as in PyTorch."""

from __future__ import annotations

import copy
import subprocess

import pytest
import torch
from forked import python
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import ortlab
from ortlab.engine.kept_builds import written_buffers
from ortlab.engine.tracing.graph_inputs import StateWrites
from ortlab.errors import BuildError, ExecutionError

pytestmark = pytest.mark.usefixtures("no_fallback")


class Net(nn.Module):
    """Two layers, of which the second is the first's teacher, and buffers."""

    def __init__(self, body):
        super().__init__()
        self.student, self.teacher, self.body = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), body
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("hidden", torch.ones(4, 4), persistent=False)
        self.register_buffer("queue", torch.randn(8, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.body(self, self.student(x), x)


def in_place(net, h, _):
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - net.mean


def assigned(net, h, _):
    net.mean = 0.9 * net.mean + 0.1 * h.detach().mean(0)
    return h - net.mean


def read_before_and_after(net, h, _):
    before = h * net.mean
    net.mean = net.mean * 0.5 + h.detach().mean(0)
    return before + h * net.mean


def hidden_from_the_state_dict(net, h, _):
    net.hidden.lerp_(h.detach().abs().mean(0), 0.1)
    return h / net.hidden[0]


def counted(net, h, _):
    net.count += 1
    return h * net.count


def queued_by_slices(net, h, _):
    old = net.queue.clone()
    with torch.no_grad():
        net.queue[:-2] = net.queue[2:].clone()
        net.queue[-2:] = h[:2]
    return h @ old.T


def scattered(net, h, x):
    rows = (x[:, 0] > 0).long()
    with torch.no_grad():
        net.queue.index_add_(0, rows, 0.1 * (h - net.queue[rows]))
    return (h - net.queue[rows]).square().sum()


def drawn(net, h, _):
    net.mean.normal_()
    return h + net.mean


def written_by_data(net, h, _):
    net.mean.data.mul_(0.99).add_(h.mean(0), alpha=0.01)
    net.hidden.data = net.hidden + net.mean
    return h @ net.hidden


def teacher_moved(net, h, x):
    with torch.no_grad():
        for ours, theirs in zip(net.student.parameters(), net.teacher.parameters(), strict=True):
            theirs.mul_(0.9).add_(ours, alpha=0.1)
    return (h - net.teacher(x)).square().sum()


def teacher_moved_by_data(net, h, x):
    for ours, theirs in zip(net.student.parameters(), net.teacher.parameters(), strict=True):
        theirs.data = theirs.data * 0.9 + ours.data * 0.1
    return F.cosine_similarity(h, net.teacher(x).detach()).sum()


def weights_clamped(net, h, _):
    with torch.no_grad():
        net.student.weight.clamp_(-0.2, 0.2)
        net.student.weight[0] = 0.1
    return net.student(h).tanh().sum() + h.sum()


def weights_masked_by_data(net, h, x):
    before = net.student.weight * x[0]
    net.student.weight.data *= net.hidden.tril()
    return net.student(h).tanh().sum() + before.sum()


def weights_renormed(net, h, _):
    net.student.weight.data = torch.renorm(net.student.weight.data, p=2, dim=0, maxnorm=0.5)
    return net.student(h).tanh()


BODIES = (
    weights_clamped,
    weights_masked_by_data,
    weights_renormed,
    in_place,
    assigned,
    read_before_and_after,
    hidden_from_the_state_dict,
    counted,
    queued_by_slices,
    scattered,
    drawn,
    written_by_data,
    teacher_moved,
    teacher_moved_by_data,
)
BATCHES = (4, 4, 6)


def state(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def steps(module, batches=BATCHES, shape=(4,)):
    """Train on some batches, and return outputs, gradients and state of each step."""
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], 0.1)
    seen = []
    for number, rows in enumerate(batches):
        torch.manual_seed(number)
        output = module(torch.randn(rows, *shape))
        optimizer.zero_grad()
        output.sum().backward()
        grads = [one.grad for one in module.parameters() if one.requires_grad]
        optimizer.step()
        seen.append(([output.detach(), *grads], {name: one.clone() for name, one in state(module).items()}))
    return seen


def pair(body):
    torch.manual_seed(1)
    model = Net(body).train()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_is_written_stands_there_after_each_step(body, wrap):
    model, reference = pair(body)
    lab = wrap(model)
    kept = {name: one.data_ptr() for name, one in state(model).items()}
    for actual, expected in zip(steps(model), steps(reference), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert lab.status.executed_by == "ort"
    assert not any("unreachable" in one.text for one in lab.messages if one.level == "WARNING")
    assert model.state_dict().keys() == reference.state_dict().keys()
    assert kept == {name: one.data_ptr() for name, one in state(model).items()}


@pytest.mark.parametrize("body", [in_place, queued_by_slices, weights_masked_by_data, teacher_moved_by_data])
def test_in_evaluation_too(body, wrap):
    model, reference = pair(body)
    lab = wrap(model.eval())
    reference.eval()
    for rows in BATCHES:
        x = torch.randn(rows, 4)
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state(model), state(reference), rtol=1e-5, atol=1e-6)
    assert lab.status.executed_by == "ort"


def builds(lab):
    """Return what was said of builds that no option asked for."""
    return [one.text for one in lab.messages if "Built anew" in one.text]


@pytest.mark.parametrize("body", [hidden_from_the_state_dict, written_by_data])
def test_a_buffer_outside_the_state_dict_is_exported_once_for_each_mode(body, wrap):
    model, reference = pair(body)
    lab, x = wrap(model), torch.randn(4, 4)
    for _ in range(2):
        for module in (model, reference):
            module.train()
        torch.testing.assert_close(steps(model), steps(reference), rtol=1e-5, atol=1e-6)
        for module in (model, reference):
            module.eval().hidden.mul_(2)
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state(model), state(reference), rtol=1e-5, atol=1e-6)
    assert lab.status.executed_by == "ort"
    assert not builds(lab)


READERS = {
    "contiguous": lambda net, h, _: h - net.mean.contiguous(),
    "to": lambda net, h, _: h - net.mean.to(h.dtype),
    "broadcast_tensors": lambda net, h, _: sum(torch.broadcast_tensors(h, net.queue[:4], net.hidden)),
    "mse_loss": lambda net, h, _: h + F.mse_loss(h, net.hidden),
    "a parameter": lambda net, h, _: h @ net.student.weight.contiguous() + net.teacher.bias.to(h.dtype),
}


@pytest.mark.parametrize("body", READERS.values(), ids=READERS)
def test_what_a_forward_reads_only_is_not_written(body, wrap, monkeypatch):
    # Some functions return their argument, which then is another value of the trace.
    exports = []
    end = StateWrites.end
    monkeypatch.setattr(StateWrites, "end", lambda *of: exports.append(end(*of)))
    model, reference = pair(body)
    lab = wrap(model)
    found, expected = (steps(one, batches=(4, 4)) for one in (model, reference))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert lab.status.executed_by == "ort"
    assert len(exports) == 1
    assert not written_buffers(model)


def test_a_buffer_that_training_alone_writes_to_is_no_constant_of_evaluation(wrap):
    class Centred(Net):
        def forward(self, x):
            h = self.student(x)
            if self.training:
                self.hidden.lerp_(h.detach(), 0.5)
            return h - self.hidden

    torch.manual_seed(0)
    model = Centred(None)
    reference, x = copy.deepcopy(model), torch.randn(4, 4)
    lab = wrap(model)
    for _ in range(3):
        for module in (model, reference):
            module.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)
        for module in (model, reference):
            module.train()
            module(x)
    assert len(builds(lab)) == 1  # the first evaluation's, when nobody knew yet


def discriminator():
    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, 4, 3)),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.1),
        nn.utils.spectral_norm(nn.Conv2d(4, 4, 3)),
        nn.Flatten(),
        spectral_norm(nn.Linear(16, 1)),  # of one row: another iteration of the same weight changes nothing
    )


def test_a_discriminator_with_spectral_norms_trains_as_in_pytorch(wrap):
    torch.manual_seed(0)
    model = discriminator().train()
    reference = copy.deepcopy(model)
    lab = wrap(model)
    for actual, expected in zip(
        steps(model, shape=(3, 6, 6)), steps(reference, shape=(3, 6, 6)), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert lab.status.executed_by == "ort"
    for module in (model, reference):
        module.eval()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)


def test_an_export_leaves_the_state_as_it_was(wrap):
    model, reference = pair(teacher_moved)
    lab = wrap(model)
    steps(model, BATCHES[:1])
    steps(reference, BATCHES[:1])
    lab.set(compute_optimizer=False)  # another export
    steps(model, BATCHES[:1])
    steps(reference, BATCHES[:1])
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_rerun_begins_with_the_state_that_the_step_began_with(wrap):
    model, reference = pair(in_place)
    lab, x = wrap(model), torch.randn(4, 4)

    def step():
        loss = model(x).square().sum()
        loss.backward()
        return loss

    losses = [lab.step(step).losses for _ in range(2)]
    again = lab.rerun().losses
    assert again == losses[-1] != losses[0]
    for _ in range(2):
        reference(x)
    torch.testing.assert_close(model.mean, reference.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("persistent", [True, False])
def test_an_export_from_the_disk_writes_too(persistent, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "import ortlab\n"
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 4)\n"
        f"        self.register_buffer('mean', torch.zeros(4), persistent={persistent})\n"
        "    def forward(self, x):\n"
        "        h = super().forward(x)\n"
        "        self.mean.mul_(0.5).add_(h.detach().mean(0))\n"
        "        return h - self.mean\n"
        "torch.manual_seed(0)\n"
        "model = Net()\n"
        "lab = ortlab.wrap(model, export_cache_dir=sys.argv[1])\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "print(model.mean.tolist(), lab.status.executed_by)\n"
        "print([one.text for one in lab.messages if 'Built anew' in one.text])\n"
    )
    said = [
        subprocess.run(python(script, tmp_path / "cache"), check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert said[0].endswith("ort\n[]\n")


def test_a_plan_and_a_fallback_write_what_pytorch_writes(wrap):
    model, reference = pair(in_place)
    lab = wrap(model, memory_level=1)
    for actual, expected in zip(steps(model), steps(reference), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    lab.set(engine="eager")
    torch.testing.assert_close(steps(model), steps(reference), rtol=1e-5, atol=1e-6)


# --- what is refused ------------------------------------------------------------------------------------------------


def grown(net, h, _):
    net.queue = torch.cat([net.queue, h.detach()])
    return h @ net.queue.T


def with_a_gradient(net, h, _):
    net.mean = net.mean + h.mean(0)
    return h - net.mean


def out_of_sight(net, h, _):
    net.mean.numpy()[:] += 1  # no trace sees that
    return h - net.mean


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (grown, "becomes float32 12 x 4, and was float32 8 x 4"),
        (with_a_gradient, "has a gradient"),
        (out_of_sight, "a trace does not see"),
    ],
    ids=["another shape", "a gradient", "out of sight"],
)
def test_what_cannot_be_written_is_refused_by_name(body, why):
    model, reference = pair(body)
    ortlab.wrap(model)
    with pytest.raises(BuildError, match=r"changes buffers: (queue|mean)") as refusal:
        model(torch.randn(4, 4))
    assert why in str(refusal.value)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_normalisation_that_nothing_is_made_of_is_refused(momentum):
    class Unread(nn.Sequential):
        def forward(self, x):
            self[0](x)
            return self[1](x)

    model = Unread(nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 4))
    ortlab.wrap(model)
    with pytest.raises(BuildError, match="is made of this normalisation's result"):
        model(torch.randn(4, 4))
    assert not model[0].running_mean.any()


def test_a_place_that_moves_is_refused_when_it_has_moved(wrap):
    def enqueued(net, h, _):
        place = int(net.count)
        with torch.no_grad():
            net.queue[place : place + 2] = h[:2]
        net.count += 2
        return h @ net.queue.T

    model, _ = pair(enqueued)
    lab = wrap(model)
    lab.module(torch.randn(4, 4))
    before = model.queue.clone()
    with pytest.raises(ExecutionError, match="depends on a value"):
        lab.module(torch.randn(4, 4))
    torch.testing.assert_close(model.queue, before, rtol=0, atol=0)
