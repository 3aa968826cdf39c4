"""How models of other people, which nobody here tried to please, train on ONNX Runtime: tiny ones, against PyTorch.

python bench/outside_models.py --install            once: the pinned packages, into build/outside, for this alone
python bench/outside_models.py                      all
python bench/outside_models.py --only GAT FEDformer these, anew; the others stay as they are in the file

Each takes two steps, with batches of two sizes, in a process of its own, on ONNX Runtime and in eager PyTorch from the
same weights. Compared are outputs, and the gradient of every parameter and input. The verdicts:

- parity: within 1e-5 of PyTorch, as in the zoo, or within its rounding: no further from it than three times the most
  that PyTorch itself moves by when its weights change in their last digit, in four ways, or no further from PyTorch
  with float64 than three times PyTorch's own float32;
- refused: an error of ortlab says what, why and what to do;
- unclear: it ends in another error;
- wrong: it trains, and differs.

What cannot be imported, or does not run in PyTorch, is left out.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from families import in_a_process
from report import REPOSITORY, Report, arguments, one_by_one

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch
    from outside_list import Outside

FOLDER = REPOSITORY / "build" / "outside"
VERDICTS = ("parity", "refused", "unclear", "wrong", "not run")
LOADED = ("torch", "transformers", "onnx", "onnxruntime", "family_training", "ortlab")
LIMIT_S = 300
SIZES = (2, 3)
RAW = (
    "onnxruntime_src",
    "onnxruntime::",
    "Non-zero status",
    "INTERNAL ASSERT",
    ".cc:",
    "torch._C",
    "lower all",
)
QUICK = ("GCN", "siamese_network")
TITLE = "Two steps with batches of two sizes, against PyTorch"


def main() -> None:
    """Train what is asked for, print and write."""
    read = arguments(
        __doc__, rounds=1, only="models", resumes=True, also={"install": "install the pinned packages first"}
    )
    prepare()
    from outside_list import PINNED, models

    if read.install:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER)]
        subprocess.run([*pip, *PINNED], check=True)
    every = models()
    unknown = set(read.only) - set(every)
    if unknown:
        raise SystemExit(f"There is no model {', '.join(sorted(unknown))}.")
    file = read.output / "outside_models.json"
    names = read.only or (QUICK if read.quick else list(every))
    kept = (
        json.loads(file.read_text(encoding="utf-8"))["tables"][TITLE] if read.only and file.exists() else []
    )

    def measure(name: str) -> dict[str, Any]:
        row = {"model": name, "source": every[name].source, "verdict": "", "difference": "", "reason": ""}
        row |= in_a_process(child, (name,), LOADED, LIMIT_S)
        return row | {"verdict": "unclear" if row["verdict"] == "error" else row["verdict"]}

    rows = {row["model"]: row for row in (*kept, *one_by_one("outside_models", read, names, measure))}
    report = Report("outside_models", read)
    ordered = [rows[name] for name in every if name in rows]
    report.table(TITLE, ordered)
    counts = Counter(row["verdict"] for row in ordered)
    report.note(", ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS))
    tried = len(ordered) - counts["not run"]
    report.claim(
        "Of outside models, share that does not train with parity", 1 - counts["parity"] / tried, at_most=0.05
    )
    report.claim(
        "Of outside models, wrong, or refused unclearly", counts["wrong"] + counts["unclear"], at_most=0
    )
    report.write()


def prepare() -> None:
    """Let the packages of this benchmark be imported: behind all others, so that no package of the rest is replaced."""
    sys.path.append(os.environ.get("ORTLAB_OUTSIDE", str(FOLDER)))
    warnings.filterwarnings("ignore")


def child(sender: Connection, name: str) -> None:
    """Train a model and send what came of it."""
    import torch
    import transformers
    from outside_list import models

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.logging.set_verbosity_error()
    without_compiled_operators()
    sender.send(train(models()[name]))
    sender.close()


def without_compiled_operators() -> None:
    """Let torchvision be imported beside a torch that its compiled operators are not for: no model here has any."""
    import torch

    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        without_compiled_operators.library = library  # type: ignore[attr-defined] # it ends with its object


def train(outside: Outside) -> dict[str, Any]:
    """Return verdict, difference and reason of one model."""
    import torch

    from ortlab.errors import OrtlabError

    try:
        torch.manual_seed(0)
        model = outside.build().train()
        for part in model.modules():
            if isinstance(part, torch.nn.modules.dropout._DropoutNd):  # noqa: SLF001
                part.p = 0.0
            for name in ("drop_rate", "dropout_prob"):  # before a head, in timm; of labels, in diffusers
                if hasattr(part, name):
                    setattr(part, name, 0.0)
        torch.manual_seed(1)
        batches = [outside.batch(size) for size in SIZES]
        eager = steps(copy.deepcopy(model), copy.deepcopy(batches))
    except Exception as error:  # noqa: BLE001 - no matter of ONNX Runtime
        return {"verdict": "not run", "reason": said(error)}
    try:
        ours = steps(copy.deepcopy(model), copy.deepcopy(batches), wrapped=True)
    except OrtlabError as error:
        clear = bool(error.fix) and not any(raw in error.what for raw in RAW)
        return {"verdict": "refused" if clear else "unclear", "reason": said(error)}
    except Exception as error:  # noqa: BLE001 - it is the result
        return {"verdict": "unclear", "reason": said(error)}
    from family_training import MOVED, ROUNDING, TOLERANCE, in_the_last_digit

    found, where = apart(ours, eager)
    if found <= TOLERANCE:
        return {"verdict": "parity", "difference": found, "reason": ""}
    moved = max(
        apart(steps(in_the_last_digit(copy.deepcopy(model), seed), copy.deepcopy(batches)), eager)[0]
        for seed in range(1, 1 + MOVED)
    )
    is_rounding = found <= ROUNDING * moved
    if not is_rounding:
        exact = steps_in_float64(model, batches)
        is_rounding = exact is not None and apart(ours, exact)[0] <= ROUNDING * apart(eager, exact)[0]
    return {"verdict": "parity" if is_rounding else "wrong", "difference": found, "reason": where}


def steps_in_float64(model: torch.nn.Module, batches: list[Any]) -> list[Any] | None:
    """Return the two steps in PyTorch with float64; None where a model insists on float32."""
    import torch
    from torch.utils._pytree import tree_map

    def doubled(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else copy.deepcopy(value)

    try:
        return steps(copy.deepcopy(model).double(), tree_map(doubled, batches))
    except RuntimeError:
        return None


def steps(
    model: torch.nn.Module, batches: list[Any], *, wrapped: bool = False
) -> list[dict[str, dict[str, Any]]]:
    """Return losses, gradients and buffers of two steps."""
    import torch

    import ortlab

    lab = ortlab.wrap(model, log_level="ERROR") if wrapped else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    states, trained = [], dict(model.named_parameters(remove_duplicate=False))
    for number, (args, kwargs) in enumerate(batches):
        torch.manual_seed(number)
        outputs = numbers_in(model(*args, **kwargs))
        loss = torch.stack([weighed(one) for one in outputs]).sum()
        loss.backward()
        assert lab is None or lab.status.executed_by == "ort"
        states.append(
            {
                "output": {str(place): one.detach().clone() for place, one in enumerate(outputs)},
                "gradient of": {
                    name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
                },
                "buffer": {
                    name: one.clone() for name, one in model.state_dict().items() if name not in trained
                },
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    return states


def numbers_in(returned: Any) -> list[torch.Tensor]:
    """Return the tensors of floats in what a model returns, also as attributes of an object."""
    import torch
    from torch.utils._pytree import tree_leaves

    plain = returned if isinstance(returned, (torch.Tensor, tuple, list, dict)) else vars(returned)
    return [one for one in tree_leaves(plain) if isinstance(one, torch.Tensor) and one.is_floating_point()]


def weighed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum in which each entry has another weight."""
    import torch

    weights = torch.linspace(-1, 1, tensor.numel()).view_as(tensor)
    return (tensor.float() * weights).sum() / tensor.numel() ** 0.5


def apart(ours: list[Any], eager: list[Any]) -> tuple[float, str]:
    """Return the largest difference, relative as in the zoo, and where it is."""
    from family_training import Worst

    worst = Worst()
    for number, (found, wanted) in enumerate(zip(ours, eager, strict=True)):
        worst.note(found, wanted, number)
    return worst.difference, worst.where


def said(error: BaseException) -> str:
    """Return an error in one line."""
    from family_training import FOLDERS

    text = f"{type(error).__name__}: {getattr(error, 'what', '') or error}"
    return " ".join(re.sub(FOLDERS, "", text).split())[:300]


if __name__ == "__main__":
    main()
