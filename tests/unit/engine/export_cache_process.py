"""One process of its own: train and evaluate models once on ONNX Runtime, and print what came out and what was traced.

Takes the folder of the cache, or "" for none.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

import ortlab

CELL = """
import torch
from torch import nn

FACTOR = 1.5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 3)
    def forward(self, x):
        return self.head(self.drop(self.hidden(x).relu() * FACTOR)).pow(2).mean()
"""


def notebook_model():
    exec(compile(CELL, "<ipython-input-1>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102
    return vars(sys.modules["__main__"])["Net"](), {"x": torch.linspace(-1, 1, 24).view(4, 6)}


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
    return BertForSequenceClassification(BertConfig(vocab_size=64, **sizes)), batch


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ids = torch.arange(24).view(2, 12)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)), {
        "input_ids": ids,
        "labels": ids,
    }


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def run(make, folder):
    torch.manual_seed(0)
    model, batch = make()
    torch.manual_seed(2)
    lab = ortlab.wrap(model, export_cache_dir=folder)
    forwards = 0
    code = type(model).__mro__[1].forward
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__

    def count(frame, event, _argument):
        nonlocal forwards
        forwards += event == "call" and frame.f_code is code.__code__

    sys.setprofile(count)
    output = model(**batch)
    loss_of(output).backward()
    gradients = [parameter.grad.double().sum().item() for parameter in model.parameters()]
    model.eval()
    evaluated = [loss_of(model(**batch)).item() for _ in range(2)]
    sys.setprofile(None)
    said = [message.text for message in lab.messages if folder and folder in message.text]
    result = {
        "loss": loss_of(output).item().hex(),
        "gradients": [value.hex() for value in gradients],
        "evaluated": [value.hex() for value in evaluated],
        "kind": type(output).__name__,
        "problem_type": getattr(getattr(model, "config", None), "problem_type", None),
        "executed_by": lab.status.executed_by,
        "forwards": forwards,
        "read": sum("was read from" in text for text in said),
        "written": sum("was written to" in text for text in said),
    }
    lab.unwrap()
    return result


def main():
    warnings.simplefilter("ignore")
    folder = sys.argv[1]
    print(json.dumps({make.__name__: run(make, folder) for make in (notebook_model, bert, llama)}))


if __name__ == "__main__":
    main()
