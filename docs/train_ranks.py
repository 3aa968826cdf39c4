"""Train a small BERT on many ranks; each writes its ledger into the folder that is the first argument.

torchrun --standalone --nproc-per-node 2 train_ranks.py ledgers
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

import ortlab
from ortlab.ranks import save_rank

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
config = BertConfig(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    pad_token_id=0,
)
model = BertForMaskedLM(config).train()
if torch.cuda.is_available():
    torch.cuda.set_device(rank % torch.cuda.device_count())
    model.cuda()
device = next(model.parameters()).device
lab = ortlab.wrap(model, print_input_density=True)  # first ONNX Runtime,
parallel = DistributedDataParallel(model)  # and DistributedDataParallel around it
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
tokens = torch.randint(1, 128, (4 * ranks, 32))  # the same on all ranks, as the seed is
mine = tokens[rank::ranks].to(device)


def step() -> torch.Tensor:
    """Train on this rank's part of the batch."""
    loss = parallel(input_ids=mine, labels=mine.roll(1, 1)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


lab.step(step, n=5)
save_rank(lab.runs, sys.argv[1])
dist.destroy_process_group()
