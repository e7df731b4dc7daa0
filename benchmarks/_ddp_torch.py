"""Worker of ddp.py: the same model and batch sizes in PyTorch, DistributedDataParallel over Gloo."""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

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
        heads = self.qkv(self.norm1(x)).view(batch, steps, HEADS, 3, HEAD_WIDTH).permute(3, 0, 2, 1, 4)
        q, k, v = turned(heads[0], cos, sin), turned(heads[1], cos, sin), heads[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, steps, WIDTH))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.parallel.DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(VOCAB, (ROWS, TIME + 1))
    times = []
    for _ in range(rounds + 3):
        start_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()
        times.append(time.perf_counter() - start_s)
    print(json.dumps({"torch": statistics.median(times[3:])}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
