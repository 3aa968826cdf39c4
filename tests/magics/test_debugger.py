"""The debugger in a model, in a real kernel: its prompt is an input request, and nothing hangs."""

from __future__ import annotations

import os
import queue

import pytest
from jupyter_client.manager import start_new_kernel

SECONDS = 120
"""How long a kernel may take to import torch and to build a model."""

MODEL = """
import os, pdb, torch  # breakpoint() belongs to the front end's own debugger here
from torch import nn
import ortlab
place = ""
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if place == "step" and not torch.jit.is_tracing(): pdb.set_trace()
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        os.write(2, b"straight to the descriptor\\n")
        return gradient * 2
class Model(nn.Linear):
    def forward(self, x):
        if place == "export" and torch.jit.is_tracing(): pdb.set_trace()
        return Doubled.apply(super().forward(x))
model = Model(2, 2)
lab = ortlab.wrap(model, log_level={level!r})
"""

TRAIN = """
place = {place!r}
model(torch.ones(1, 2)).sum().backward()
place = ""
print("trained")
"""


@pytest.fixture(scope="module")
def kernel():
    # Under pytest a kernel leaves its descriptors alone, which is not how users run it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    manager, client = start_new_kernel(startup_timeout=SECONDS, env=environment)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client, code, answers=()):
    """Execute a cell, answer what it asks, and return what it printed to standard output and standard error."""
    answers = list(answers)
    prompts, shown = [], {"stdout": "", "stderr": ""}

    def answer(request):
        prompts.append(request["content"]["prompt"])
        client.input(answers.pop(0) if answers else "c")

    def hear(message):
        if message["msg_type"] == "stream":
            shown[message["content"]["name"]] += message["content"]["text"]

    reply = client.execute_interactive(
        code, timeout=SECONDS, stdin_hook=answer, output_hook=hear, allow_stdin=True, store_history=False
    )
    assert reply["content"]["status"] == "ok", reply["content"]
    return prompts, shown


def late(client, shown):
    """Add what the kernel forwards from its descriptors a little later."""
    while "descriptor" not in shown["stderr"]:
        try:
            message = client.get_iopub_msg(timeout=10)
        except queue.Empty:
            break
        if message["msg_type"] == "stream":
            shown[message["content"]["name"]] += message["content"]["text"]
    return shown


def without_late_threads(shown):
    """Leave out what threads of a new session say when they start, which may be after it was created."""
    return "".join(line for line in shown.splitlines(keepends=True) if "env.cc" not in line)


@pytest.mark.row("B6")
@pytest.mark.parametrize("place", ["export", "step"])
@pytest.mark.parametrize("level", ["WARNING", "INFO", "VERBOSE"])
def test_the_debugger_asks_in_the_notebook(kernel, level, place):
    run(kernel, MODEL.format(level=level))
    prompts, shown = run(kernel, TRAIN.format(place=place), ["p 6 * 7", "c"])
    assert len(prompts) >= 2
    assert all(prompt.strip() in {"(Pdb)", "ipdb>"} for prompt in prompts)
    assert "42" in shown["stdout"]
    assert "trained" in shown["stdout"]
    shown = late(kernel, shown)
    assert "straight to the descriptor" in shown["stderr"]
    assert "onnxruntime:" not in without_late_threads(shown["stderr"])


@pytest.mark.row("B7")
def test_a_talkative_build_does_not_stop_the_kernel(kernel):
    """A build that writes more than a pipe holds, while it holds Python's lock (ipykernel#795)."""
    code = """
from transformers import BertConfig, BertForMaskedLM
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
bert = BertForMaskedLM(BertConfig(**sizes))
tokens = torch.zeros((2, 8), dtype=torch.long)
lab = ortlab.wrap(bert, log_level="VERBOSE", memory_level=1)
bert(input_ids=tokens, labels=tokens).loss.backward()
print(sum(len(one.text) for one in lab.messages.of(source="ONNX Runtime")) > 65536)
"""
    run(kernel, MODEL.format(level="WARNING"))
    _, shown = run(kernel, code)
    assert shown["stdout"] == "True\n"
    assert "onnxruntime:" not in without_late_threads(shown["stderr"])
