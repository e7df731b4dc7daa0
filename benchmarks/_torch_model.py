"""What the PyTorch workers train: the transformer of `examples/` with the sizes of `_model.py`, and how they time it."""

import collections
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from _common import peak_rss_bytes, reset_peak_rss

VOCAB, WIDTH, DEPTH, HEADS, HIDDEN, ROWS, TIME = 256, 256, 2, 8, 768, 8, 64
HEAD_WIDTH = WIDTH // HEADS


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, steps, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, steps, -1, 3, HEAD_WIDTH).permute(3, 0, 2, 1, 4)
        q, k, v = turned(heads[0], cos, sin), turned(heads[1], cos, sin), heads[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, steps, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angles = torch.arange(TIME)[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def report(
    parallelize: Callable[[nn.Module], nn.Module], rounds: int, *, rows: int = ROWS, seed: int | None = None
) -> None:
    """Prints the median step and the peak memory of this process as JSON, and ends the process.

    The default seed is the rank: every process has rows of its own.
    """
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank() if seed is None else seed)
    model = parallelize(Transformer())
    optimizer = torch.optim.AdamW(_by_type(model), lr=3e-4, fused=True)
    tokens = torch.randint(VOCAB, (rows, TIME + 1))
    times = []
    for round_ in range(rounds + 3):
        if round_ == 3:
            reset_peak_rss()
        start_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()
        times.append(time.perf_counter() - start_s)
    print(json.dumps({"step_s": statistics.median(times[3:]), "rss_bytes": peak_rss_bytes()}), flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # at the interpreter's end, Gloo's threads abort now and then (torch 2.13)


def _by_type(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Parameter groups for the fused optimizer, which takes no DTensors together with plain tensors."""
    groups = collections.defaultdict(list)
    for parameter in model.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    return [{"params": group} for group in groups.values()]
