"""Two ranks with ORT inside DistributedDataParallel train as one process does with the whole batch, ORT or PyTorch."""

from __future__ import annotations

import warnings

import pytest
import torch

from ortlab.ranks import Cluster

STEPS = 4


def train(engine, *, ddp_first=False):
    """Train a BERT on this process's part of each batch; it runs here and on each rank, so it imports what it needs.

    With `ddp_first`, what is inside a DistributedDataParallel that is there already is wrapped.

    Returns
    -------
    dict
        Losses by step; gradients of the first and the last step and parameters at the end, by name.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import BertConfig, BertForMaskedLM

    import ortlab

    torch.manual_seed(0)
    together = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config).train()
    batches = [torch.randint(1, 64, (2, 4, 16)) for _ in range(4)]
    if ddp_first:
        called = DistributedDataParallel(model)
        lab = ortlab.wrap(called.module, engine=engine)
    else:
        lab = ortlab.wrap(model, engine=engine)
        called = DistributedDataParallel(model) if together else model
    # Not Adam: it divides a gradient that is nothing but rounding by its own size.
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1, momentum=0.9)
    gradients, losses = [], []
    for tokens, labels in (batch[:, rank::ranks].contiguous() for batch in batches):
        loss = called(input_ids=tokens, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    executed_by = lab.status.executed_by
    parameters = {name: one.detach().clone() for name, one in model.named_parameters()}
    lab.unwrap()
    found = {"losses": losses, "first": gradients[0], "last": gradients[-1], "parameters": parameters}
    return {**found, "executed by": executed_by}


@pytest.fixture(scope="module")
def cluster():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one core
        started = Cluster(2, threads=1)
    with started:
        yield started


@pytest.fixture(scope="module", params=["wrapped first", "DDP first"])
def two_ranks(request, cluster):
    return cluster.run(train, "ort", ddp_first=request.param == "DDP first")


@pytest.fixture(scope="module", params=["ort", "eager"])
def one_process(request):
    return train(request.param)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.row("A5")
def test_two_ranks_train_as_one_process_with_the_same_global_batch(two_ranks, one_process):
    assert [one["executed by"] for one in two_ranks] == ["ort", "ort"]
    assert len(one_process["losses"]) == STEPS
    # Each rank has half of the samples, and as many labels: the mean of their losses is that of the whole batch.
    means = torch.tensor([one["losses"] for one in two_ranks], dtype=torch.float64).mean(0)
    assert means.tolist() == pytest.approx(one_process["losses"], rel=1e-5)
    assert two_ranks[0]["losses"] != two_ranks[1]["losses"]
    for kind in ("first", "last", "parameters"):
        for name, expected in one_process[kind].items():
            first, second = (one[kind][name] for one in two_ranks)
            assert torch.equal(first, second), (kind, name)
            # Attention does not depend on the bias of its keys: what is there is rounding.
            scale = max(float(expected.abs().max()), 1e-3)
            assert float((first - expected).abs().max()) <= 1e-5 * scale, (kind, name)
