"""Worker of fsdp.py: the same model and batch sizes in PyTorch, FSDP2 over Gloo, a unit for each block."""

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from _torch_model import report


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    report(sharded, rounds=int(sys.argv[1]))
