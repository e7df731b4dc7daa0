"""`gathered`: a pipelined model on the whole mesh for a while, to be called as any model."""

import contextlib
from collections.abc import Iterator

from flax import nnx

from jaxpar._module import ModuleT
from jaxpar.mesh import MeshLike, as_jax_mesh
from jaxpar.pp._pipeline import plan_of
from jaxpar.pp._place import on_whole_mesh, restricted


@contextlib.contextmanager
def gathered(model: ModuleT, mesh: MeshLike) -> Iterator[ModuleT]:
    """While it lasts, the model's arrays lie on the whole mesh, so that it can be called: evaluation, samples, notebooks.

    After its first step a pipelined model is spread over the devices of its stages, and a call of all of it would meet
    arrays of different devices. Inside this context each device holds what one stage would hold of every stage: arrays are
    copied along the pipeline's axis, sharded over the other axes as before. What is assigned meanwhile is kept. If stages lie
    on several processes, all of them must enter it, and what they assign must lie on the whole mesh.

    Args:
        model: a model that was given to `pipeline`; any other is left as it is.
        mesh: the mesh of its `TrainStep`.

    Yields:
        The model.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpar
        >>> from flax import nnx
        >>> mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
        >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)])
        >>> model = jaxpar.pp.pipeline(model, mesh["pp"], n_stages=2, n_microbatches=2)
        >>> with gathered(model, mesh):
        ...     y = model(jnp.ones((1, 4)))
    """
    plan = plan_of(model)
    if plan is None:
        yield model
        return
    jax_mesh = as_jax_mesh(mesh)
    variables = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]
    homes = [(variable, variable.get_value()) for variable in variables]
    copies = [on_whole_mesh(value, jax_mesh, plan.axis) for _, value in homes]
    for (variable, _), copy in zip(homes, copies, strict=True):
        variable.set_value(copy)
    try:
        yield model
    finally:
        for (variable, value), copy in zip(homes, copies, strict=True):
            now = variable.get_value()
            variable.set_value(value if now is copy else restricted(now, value.sharding))
