"""Worker of ddp.py: the same model and batch sizes in PyTorch, DistributedDataParallel over Gloo."""

import sys

from torch import nn

from _torch_model import report

if __name__ == "__main__":
    report(nn.parallel.DistributedDataParallel, rounds=int(sys.argv[1]))
