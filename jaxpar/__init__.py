"""jaxpar: PyTorch's distributed-training stack, re-made for JAX and Flax."""

import importlib
import typing as _typing

from jaxpar import cp as cp
from jaxpar import data as data
from jaxpar import ddp as ddp
from jaxpar import debug as debug
from jaxpar import fsdp as fsdp
from jaxpar import mesh as mesh
from jaxpar import pp as pp
from jaxpar import tp as tp
from jaxpar import train as train
from jaxpar._init_sharded import init_sharded as init_sharded
from jaxpar._mean import Mean as Mean
from jaxpar.mesh import init_device_mesh as init_device_mesh
from jaxpar.mesh import init_process_group as init_process_group
from jaxpar.train import TrainStep as TrainStep

if _typing.TYPE_CHECKING:
    from jaxpar import checkpoint as checkpoint


def __getattr__(name: str) -> _typing.Any:
    """`jaxpar.checkpoint` is imported when it is first used: Orbax takes as long as all the rest."""
    if name == "checkpoint":
        return importlib.import_module("jaxpar.checkpoint")
    raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
