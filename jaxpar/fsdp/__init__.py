"""Fully sharded data parallelism: shard parameters, gather to use, scatter gradients."""

from jaxpar.fsdp._full_state import full_state as full_state
from jaxpar.fsdp._fully_shard import fully_shard as fully_shard
from jaxpar.fsdp._fully_shard import register_fsdp_forward_method as register_fsdp_forward_method
from jaxpar.fsdp._functional import sharded_call as sharded_call
from jaxpar.fsdp._functional import unshard as unshard
from jaxpar.fsdp._load_full_state import load_full_state as load_full_state
from jaxpar.fsdp._offload import CPUOffloadPolicy as CPUOffloadPolicy
from jaxpar.fsdp._offload import offload_optimizer_state as offload_optimizer_state
from jaxpar.fsdp._policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from jaxpar.fsdp._report import ParameterRow as ParameterRow
from jaxpar.fsdp._report import ShardingReport as ShardingReport
from jaxpar.fsdp._report import sharding_report as sharding_report
from jaxpar.fsdp._zero1 import shard_optimizer_state as shard_optimizer_state
