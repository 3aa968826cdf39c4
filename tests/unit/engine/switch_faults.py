"""Faults of onnxruntime 1.19.2 in its switches and checks: what each does as released.

Run as a script it tries 1.19.2 as it is, each fault in a process of its own, and prints what happened. The models
are also those with which the tests try the same through ortlab.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from fault_cases import unrepaired
from torch import nn


class TokenLoss(nn.Module):
    """Embedding and cross entropy, most of whose labels are to be ignored."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 20)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, ids, labels):
        scores = self.head(self.layers(self.embedding(ids)))
        return self.criterion(scores.view(-1, 20), labels.view(-1))


def token_batch():
    """Tokens without padding, and labels of which a quarter counts."""
    ids = torch.randint(1, 20, (4, 8))
    return ids, torch.where(torch.arange(8) < 2, ids, -100)


class Dropped(nn.Module):
    """Dropout of half of the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return nn.functional.dropout(x * self.weight, 0.5, training=self.training)


class AnyDtype(nn.Module):
    """A layer that takes numbers of every dtype."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x.float())


def encoder():
    """PyTorch's own encoder of one layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def operators(wrapped):
    """Operators of the graph that the gradient is built from."""
    manager = wrapped._torch_module._execution_manager(True)
    return [node.op_type for node in manager._onnx_models.optimized_model.graph.node]


def step(ortmodule, **variables):
    """Set variables, wrap the model, run it once."""
    os.environ.update(variables)
    torch.manual_seed(2)
    wrapped = ortmodule.ORTModule(TokenLoss())
    wrapped(*token_batch()).backward()
    return wrapped


def label_rows(ortmodule, **variables):
    """Tell whether rows with ignored labels are left out."""
    return "left out" if "ShrunkenGather" in operators(step(ortmodule, **variables)) else "computed"


def switched_off_later(ortmodule):
    """Switch the compute optimizer off between wrapping and the first step."""
    wrapped = ortmodule.ORTModule(TokenLoss())
    wrapped._torch_module._execution_manager(True)._runtime_options.enable_compute_optimizer = False
    wrapped(*token_batch()).backward()
    sys.stdout.flush()  # what the step above has printed does not count
    with tempfile.TemporaryFile("w+") as said:
        os.dup2(said.fileno(), 1)
        for _ in range(3):
            wrapped(*token_batch()).backward()
        sys.stdout.flush()
        said.seek(0)
        printed = said.read().count("label tensor density")
    return f"{operators(wrapped).count('PythonOp')} PythonOp, printed in {printed} of 3 steps"


def level_fatal(ortmodule):
    """Take a step at the log level FATAL."""
    level = ortmodule.DebugOptions(log_level=ortmodule.LogLevel.FATAL)
    ortmodule.ORTModule(TokenLoss(), level)(*token_batch())


def severity_of_warning(ortmodule):
    """Ask which severity a session gets at the log level WARNING; ONNX Runtime's own 2 is "warning", 3 "error"."""
    wrapped = step(ortmodule, ORTMODULE_LOG_LEVEL="WARNING")
    return wrapped._torch_module._execution_manager(True)._get_session_config()[0].log_severity_level


def evaluation_from_the_cache(ortmodule):
    """Train, then evaluate, with exports kept on disk; say which part of the output is zero."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORTMODULE_CACHE_DIR"] = folder
        wrapped = ortmodule.ORTModule(Dropped())
        wrapped(torch.ones(1000)).sum().backward()
        wrapped.eval()
        with torch.no_grad():
            zeros = (wrapped(torch.ones(1000)) == 0).double().mean().item()
    return "dropout is active" if zeros > 0.3 else "dropout is off"


def standard_deviation(_):
    """Ask the subscriber for the statistics of values whose standard deviation is one."""
    from onnxruntime.training.utils.hooks import StatisticsSubscriber, SubscriberManager

    torch.manual_seed(2)
    values = torch.randn(1000) + 5
    with tempfile.TemporaryDirectory() as folder:
        model = nn.Sequential(nn.Identity())
        SubscriberManager().subscribe(model, [StatisticsSubscriber(folder, override_output_dir=True)])
        model(values)
        said = "".join(path.read_text() for path in Path(folder).rglob("*") if path.is_file())
    return said.partition("std:")[2].split(",")[0].split()[0]


def first_masks(ortmodule):
    """Draw two dropout masks from seed 0."""
    wrapped, x = ortmodule.ORTModule(Dropped()), torch.ones(200)
    torch.manual_seed(0)
    return "same" if torch.equal(wrapped(x), wrapped(x)) else "different"


def savings(ortmodule):
    """Read the symbols of the predicted savings of a model with ignored labels."""
    wrapped = step(ortmodule, ORTMODULE_LOG_LEVEL="ERROR")
    agent = wrapped._torch_module._execution_manager(True)._execution_agent
    _, saved = agent.get_serialized_ortmodule_memory_stat("", "1:0", True)
    return "unresolved" if "valid_indices_count" in str(saved) else "resolved"


def other_dtype(ortmodule):
    """Call a model with float64 after float32."""
    wrapped = ortmodule.ORTModule(AnyDtype())
    wrapped(torch.ones(4)).sum().backward()
    wrapped(torch.ones(4, dtype=torch.float64)).sum().backward()


def transformer_encoder(ortmodule):
    """Take a step with PyTorch's own encoder."""
    ortmodule.ORTModule(encoder())(torch.randn(2, 5, 8)).sum().backward()


FAULTS = {
    "T2": lambda ort: step(ort, ORTMODULE_ENABLE_COMPUTE_OPTIMIZER="0"),
    "T3": lambda ort: step(ort, ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER="0"),
    "T4": lambda ort: label_rows(ort, ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER="0"),
    "T5": lambda ort: label_rows(ort, ORTMODULE_ENABLE_SPARSE_OPTIMIZER="0"),
    "T6": switched_off_later,
    "T8": lambda ort: step(ort, ORTMODULE_MEMORY_OPT_CONFIG="Gelu+:1:-1"),
    "T9": level_fatal,
    "T10": severity_of_warning,
    "T11": evaluation_from_the_cache,
    "T12": standard_deviation,
    "T13": first_masks,
    "T16": savings,
    "T17": other_dtype,
    "T18": transformer_encoder,
}


def main():
    warnings.simplefilter("ignore")
    os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
    ortmodule = unrepaired()
    for name, fault in FAULTS.items():
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(2, 1)  # what ORT prints is no outcome
            try:
                outcome = fault(ortmodule)
            except Exception as error:  # noqa: BLE001 - whatever ORT raises is the outcome
                outcome = f"{type(error).__name__}: {error}"
            os.write(writer, json.dumps(outcome, default=lambda _: "trained").encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        print(json.dumps([name, json.loads(said) if said else "crash"]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
