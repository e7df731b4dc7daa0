"""Worker of launch.py: the same first collective in PyTorch, over Gloo."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os.write(1, f"worker {os.getpid()}\n".encode())  # one write: two workers may share a pipe
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(60)
dist.destroy_process_group()
