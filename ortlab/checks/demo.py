"""The README's first minute without a notebook: wrap a small BERT, run its step, ask for a budget, compare."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ortlab.checks.masked_language import Setting, prepare
from ortlab.records.verdicts import FASTER, SLOWER

if TYPE_CHECKING:
    from ortlab.records.comparison import Comparison
    from ortlab.records.runs import Ledger

BUDGET: Final = "70%"

_TURN_STEPS: Final = 4
"""Steps of each turn of the comparison, so that the demo takes about a minute."""

TO_TRY: Final = (
    "lab = %ort_wrap model                      # your own model, in a notebook: the panel appears",
    f"%ort_budget {BUDGET}                            # after a %%ort_step cell with your training step",
    "%ort_compare engine=eager memory_level=1   # against PyTorch, and against ONNX Runtime's own level 1",
)


def main(setting: Setting, show: Callable[[str], None] = print) -> Ledger:
    """Train on ONNX Runtime, take 30 % off the memory that a step needs, and compare with PyTorch.

    Returns all runs: the first on ONNX Runtime, then those of the comparison in turns. Raises OrtlabError, which says
    what to do, where the installation cannot train.
    """
    import ortlab
    from ortlab import units
    from ortlab.render import text
    from ortlab.render.page import Folded, Note, Page
    from ortlab.render.pages import compose

    model, step = prepare(setting)
    weights = units.count(sum(parameter.numel() for parameter in model.parameters()))
    show(
        f"A BERT of {setting.layers} layers and {weights} weights learns English from Python's language reference,"
        f" in batches of {setting.batch} x {setting.length} tokens.\n"
    )
    lab = ortlab.wrap(model)
    show(f"lab.step(step, n={setting.steps})                    training steps on ONNX Runtime ...")
    lab.step(step, n=setting.steps)
    show(f'lab.budget("{BUDGET}")                       which plans take 30 % off what a step needs? ...')
    budget = lab.budget(BUDGET)
    show(
        'lab.compare(..., engine="eager")         ONNX Runtime with and without them, and PyTorch, in turns ...'
    )
    without = {"memory_plan": (), "memory_level": 0}
    comparison = lab.compare(
        without,
        *([{"engine": "ort"}] if budget.applied else []),  # as the budget has left it
        baseline={"engine": "eager"},
        n=min(setting.steps, _TURN_STEPS),
    )
    answer = next(block.text for block in compose(budget).blocks if isinstance(block, Note))
    page = compose(comparison)
    short = Page(page.title, tuple(block for block in page.blocks if not isinstance(block, Folded)))
    show("\n" + "\n\n".join(textwrap.fill(words, 100) for words in (answer, advice(comparison))))
    show("\n" + text.render(short))
    show("\nNext, with a model of yours (ortlab lab opens a notebook):\n")
    for line in TO_TRY:
        show(f"    {line}")
    return lab.runs


def advice(comparison: Comparison) -> str:
    """Say what to make of ONNX Runtime's time beside PyTorch's.

    The comparison's baseline is PyTorch, and its first contrast ONNX Runtime without plans.
    """
    plain = comparison.contrasts[0]
    if plain.verdict == SLOWER:
        return (
            "Without plans ONNX Runtime is slower than PyTorch here, as it is with many models on a CPU. Use it where"
            " memory is what limits you, and measure your own model: some are quicker on it."
        )
    if plain.verdict == FASTER:
        return (
            "Without plans ONNX Runtime is faster than PyTorch here. Measure your own model before you rely on that:"
            " many are slower on a CPU."
        )
    return (
        "Without plans no difference in time between ONNX Runtime and PyTorch was shown here, so memory is what"
        " decides. Measure your own model: on a CPU some are quicker on ONNX Runtime, and many are slower."
    )
