"""ORT against PyTorch over four optimizer steps: loss, gradients, parameters and buffers."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import zoo_models as models
from differences import TOLERANCE, Differences

pytestmark = [
    pytest.mark.zoo,
    # ORTModule looks at every attribute of the model; transformers announces the end of one of them.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # transformers 5 renames it; the older ones of our range have this name only.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    # torch 2.4's own checkpoints, in PyTorch's backward.
    pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning"),
    # What torch's exporter says about models of transformers and about batch normalisation, which ortlab takes care of.
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation from node aten..add_:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size other than 1:UserWarning"),
]

STEPS = 4

CASES = [pytest.param(entry, id=entry.name) for entry in models.ENTRIES if not entry.absent()]


def gradients(module):
    return {
        name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
    }


def nodes_behind(loss):
    """Return the kinds of the nodes that PyTorch's autograd will run for a loss."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


@pytest.mark.parametrize("entry", CASES)
def test_four_steps_agree_with_pytorch(entry, wrap, session_runs, record_property):
    case = entry.make()
    reference = copy.deepcopy(case.model).train()
    lab = wrap(case.model.train(), **case.options)
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=case.learning_rate, momentum=0.9)
        for module in (reference, case.model)
    ]
    found = Differences()
    start = {name: one.clone() for name, one in case.model.named_parameters()}
    for step in range(1, STEPS + 1):
        expected, actual = case.loss(reference(**case.batch)), case.loss(case.model(**case.batch))
        assert session_runs == {"forward": step, "backward": step - 1}, "no session of ONNX Runtime ran"
        assert any("ORTModuleFunction" in kind for kind in nodes_behind(actual)), "the loss is not ORT's"
        expected.backward()
        actual.backward()
        assert session_runs == {"forward": step, "backward": step}, "the backward was not ONNX Runtime's"
        assert lab.status.executed_by == "ort"
        assert lab.status.reason == "first call in this mode", "a step was exported anew"
        found.compare("loss", {"": expected.detach()}, {"": actual.detach()})
        assert gradients(reference)
        found.compare("gradient", gradients(reference), gradients(case.model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.compare("parameter", dict(reference.named_parameters()), dict(case.model.named_parameters()))
        found.compare("buffer", dict(reference.named_buffers()), dict(case.model.named_buffers()))
    assert any(not torch.equal(one, start[name]) for name, one in case.model.named_parameters()), (
        "nothing trained"
    )
    record_property("zoo", {"steps": STEPS, "learning_rate": case.learning_rate, **found.worst})
    assert not found.beyond()


EVALUATED = (
    "bert-sdpa",
    "gpt2_padded-sdpa",
    "clip-eager",
    "cnn_with_batch_norm-none",
    "gru-none",
    "transformer_encoder-none",
    "dict_output-none",
    "dataclass_output-none",
)


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluates_as_pytorch_after_training_and_trains_on(name, wrap):
    """Two steps, then `eval` without gradients, then one step more: what comes out agrees each time."""
    case = next(entry for entry in models.ENTRIES if entry.name == name).make()
    reference = copy.deepcopy(case.model)
    lab = wrap(case.model)
    found = Differences()
    pairs = [
        (module, torch.optim.SGD(module.parameters(), lr=case.learning_rate))
        for module in (reference, case.model)
    ]

    def compare():
        expected, actual = (dict(tensors_of(module(**case.batch))) for module, _ in pairs)
        assert lab.status.executed_by == "ort"
        found.compare("loss", expected, actual)

    for training in (True, True, False, True):
        for module, optimizer in pairs:
            module.train(training)
            if training:
                case.loss(module(**case.batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            compare()
        assert not found.beyond()
    found.compare("buffer", dict(reference.named_buffers()), dict(case.model.named_buffers()))
    assert not found.beyond()


def tensors_of(output, name="output"):
    """Yield every tensor of an output with its place."""
    if isinstance(output, torch.Tensor):
        yield name, output
        return
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        output = vars(output)
    parts = output.items() if isinstance(output, dict) else enumerate(output or ())
    for key, value in parts:
        yield from tensors_of(value, f"{name}.{key}")


def test_output_has_the_type_that_pytorch_gives(wrap):
    case = models.Entry(models.bert, "sdpa").make()
    expected = case.model.train()(**case.batch)
    wrap(case.model)
    actual = case.model(**case.batch)
    assert type(actual) is type(expected)
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=TOLERANCE)
    assert actual.logits.shape == actual["logits"].shape == expected.logits.shape


class Attention(torch.nn.Module):
    """Nothing but scaled dot product attention with dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.values = torch.nn.Parameter(torch.ones(1))
        self.dropout = dropout

    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x * self.values, dropout_p=self.dropout)


def test_attention_drops_as_much_as_pytorch(wrap):
    """With equal keys and values of one, each output is the kept share of the weights, scaled back up."""
    dropout, keys, rows = 0.3, 50, 4000
    torch.manual_seed(5)
    x = torch.ones(1, 1, keys, 4)
    attention = wrap(Attention(dropout).train()).module
    outputs = torch.stack([attention(x)[0, 0, :, 0].detach() for _ in range(rows // keys)]).flatten()
    deviation = (dropout / (1 - dropout) / keys) ** 0.5  # of one row
    assert abs(outputs.mean() - 1) < 5 * deviation / rows**0.5
    assert outputs.std().item() == pytest.approx(deviation, rel=0.1)
