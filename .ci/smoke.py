"""The installed wheel, from another folder: two processes train one step and agree on the loss."""

import pathlib

import jax.numpy as jnp
import optax
from flax import nnx

import jaxpar
from jaxpar.ddp import DistributedDataParallel
from jaxpar.mesh import all_gather_object, get_rank

jaxpar.init_process_group()
assert pathlib.Path(jaxpar.__file__).parent.joinpath("py.typed").exists()
mesh = jaxpar.init_device_mesh((-1,), ("dp",))
model = DistributedDataParallel(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), mesh)
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
step = jaxpar.TrainStep(lambda model, x: (model(x) ** 2).mean(), model, optimizer, mesh=mesh)
losses = [float(step(jnp.ones((4, 4)) * (1 + get_rank()))["loss"]) for _ in range(2)]
assert losses[1] < losses[0] and len({str(x) for x in all_gather_object(losses)}) == 1
print(f"wheel ok: {losses}")
