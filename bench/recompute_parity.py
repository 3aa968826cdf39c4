"""Parts of the zoo's models are recomputed: loss and gradients have to be those without, bit for bit.

Each model of tests/zoo is trained twice by ORT: as it is and with each of `WAYS`. Before, each dropout of torch.nn is
set to 0.1, so that masks are made again, and nodes run in one order on both sides, in which they draw. What is compared
are the loss, all gradients and, after a step, all buffers.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from report import REPOSITORY, THREADS, Report, arguments, one_by_one

WAYS = ("layers", "layers:1/2", "layers:1/2 nested", "layers:2 nested", "all but matmuls")
NO_LAYERS = "no repeated layers"


def main() -> None:
    """Compare, print and write."""
    read = arguments(__doc__, rounds=1, resumes=True, only="models")
    sys.path.append(str(REPOSITORY / "tests" / "zoo"))
    warnings.filterwarnings("ignore")
    from zoo_models import ENTRIES

    entries = {entry.name: entry for entry in ENTRIES if not entry.absent()}
    names = read.only or (["bert-eager", "mlp-none"] if read.quick else list(entries))
    report = Report("recompute_parity", read)
    rows = one_by_one("recompute_parity", read, names, lambda name: compared(name, entries[name]))
    report.table("Loss, gradients and buffers against those without recomputation", rows)
    for way in WAYS:
        tried = [row[way] for row in rows if row[way] != NO_LAYERS]
        report.claim(
            f"Models with other numbers under recompute={way}, of {len(tried)}",
            sum(one != "the same" for one in tried),
            at_most=0,
        )
    report.write()


def compared(name: str, entry: Any) -> dict[str, Any]:
    """Return a row that says for each way whether the numbers are the same, and how many nodes run again."""
    import torch

    import ortlab
    from ortlab.errors import OptionError, OrtlabError
    from ortlab.options.configuration import NOTHING_RECOMPUTED

    torch.set_num_threads(THREADS)
    case = entry.make()
    model = case.model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    # A memory level gives each dropout a seed of its own, from which it draws on: no step could be repeated.
    options = {
        "log_level": "ERROR",
        **case.options,
        **NOTHING_RECOMPUTED,
        "mem_efficient_grad_management": True,
    }
    lab = ortlab.wrap(model, **options)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    row: dict[str, Any] = {"model": name}
    expected: dict[str, Any] = {}
    for way in ((), *WAYS):
        model.load_state_dict(start)
        try:
            lab.set(recompute=way)
        except OptionError:
            row[str(way)] = NO_LAYERS
            continue
        try:
            found = numbers(case, model)
        except OrtlabError as error:
            found = {}
            row[str(way)] = str(error).partition("\n")[0]
        if not way:
            expected = found
            if not found:
                row |= dict.fromkeys(WAYS, "does not train without")
                break
        elif found:
            apart = [one for one in expected if not torch.equal(expected[one], found[one])]
            row[way] = f"{len(apart)} differ, {apart[0]} first" if apart else "the same"
            nodes = lab.graph("execution").model.graph.node
            row[f"again, {way}"] = sum(node.name.endswith("_recompute") for node in nodes)
    lab.unwrap(forget=True)
    return {
        "model": name,
        **{way: row[way] for way in WAYS},
        **{f"again, {way}": row.get(f"again, {way}", 0) for way in WAYS},
    }


def numbers(case: Any, model: Any) -> dict[str, Any]:
    """Take a step from the same draws; return its loss, gradients and buffers."""
    import torch

    from ortlab.engine.sessions import seed

    seed(11)
    torch.manual_seed(5)
    model.zero_grad()
    loss = case.loss(model(**case.batch))
    loss.backward()
    found = {
        f"gradient of {name}": one.grad.clone()
        for name, one in model.named_parameters()
        if one.grad is not None
    }
    buffers = {f"buffer {name}": one.clone() for name, one in model.named_buffers()}
    return {"loss": loss.detach(), **found, **buffers}


if __name__ == "__main__":
    main()
