"""Distributed data parallel: parameters on every device, gradients averaged in buckets."""

from jaxpar.ddp._batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
from jaxpar.ddp._buckets import Bucket as Bucket
from jaxpar.ddp._buckets import Group as Group
from jaxpar.ddp._buckets import assign_buckets as assign_buckets
from jaxpar.ddp._grad_bucket import GradBucket as GradBucket
from jaxpar.ddp._hooks import CommHook as CommHook
from jaxpar.ddp._hooks import StatefulHook as StatefulHook
from jaxpar.ddp._hooks import allreduce_hook as allreduce_hook
from jaxpar.ddp._hooks import bf16_compress_hook as bf16_compress_hook
from jaxpar.ddp._hooks import fp16_compress_hook as fp16_compress_hook
from jaxpar.ddp._module import DistributedDataParallel as DistributedDataParallel
from jaxpar.ddp._powersgd import PowerSGD as PowerSGD
from jaxpar.ddp._reduce import bucketed_all_reduce as bucketed_all_reduce
