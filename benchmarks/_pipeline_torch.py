"""Worker of pipeline.py: the same model, microbatches and schedules in PyTorch's pipelining, a stage for each process, over Gloo."""

import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from _torch_model import TIME, VOCAB, Block, Transformer

DEPTH, ROWS = 4, 2  # as in _pipeline_jax.py, for up to 4 ranks
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class Part(nn.Module):
    """Some blocks; the first with the embedding, the last with norm and head."""

    def __init__(self, index: int, num: int) -> None:
        super().__init__()
        whole = Transformer()
        self.embed = whole.embed if index == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH // num))
        self.head = nn.Sequential(whole.norm, whole.head) if index == num - 1 else None
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(x)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def main() -> None:
    rounds, m = int(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    rank, num = torch.distributed.get_rank(), torch.distributed.get_world_size()
    part = Part(rank, num)
    stage = PipelineStage(part, rank, num, torch.device("cpu"))
    schedules = {name: make(stage, m, loss_fn) for name, make in SCHEDULES.items()}
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(VOCAB, (ROWS * m, TIME + 1), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    for _ in range(rounds + 3):
        for name, schedule in schedules.items():
            torch.distributed.barrier()
            start_s = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            schedule.step(
                *((tokens[:, :-1],) if rank == 0 else ()),
                **({"target": tokens[:, 1:]} if rank == num - 1 else {}),
            )
            optimizer.step()
            torch.distributed.barrier()
            seconds[name].append(time.perf_counter() - start_s)
    if rank == 0:
        print(json.dumps({name: statistics.median(some[3:]) for name, some in seconds.items()}), flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # at the interpreter's end, Gloo's threads abort now and then (torch 2.13)


if __name__ == "__main__":
    main()
