"""`fully_shard`: the model keeps 1/n of every parameter; a unit's parameters are whole only while it computes.

model.blocks[0]   the same object, its class swapped; its parameters' shardings gain the mesh axis, and with them
                  the gradients' and the optimizer state's
"""

import difflib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import swap_class
from jaxpar._pytree import matches
from jaxpar.fsdp._axes import resolve_axes, resolve_reshard
from jaxpar.fsdp._call import call_unit
from jaxpar.fsdp._dims import DEFAULT_PAD_ABOVE_BYTES
from jaxpar.fsdp._offload import CPUOffloadPolicy
from jaxpar.fsdp._policy import MixedPrecisionPolicy
from jaxpar.fsdp._storage import ShardDimFn, Storage
from jaxpar.fsdp._unit import UNIT, Group, Unit, named_own_variables, unit_of
from jaxpar.mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._flat_buffers import default_flatten_below_bytes

ModuleOrModules = TypeVar("ModuleOrModules", bound=nnx.Module | Sequence[nnx.Module])


def fully_shard(
    module: ModuleOrModules,
    mesh: MeshLike,
    *,
    units: str | Sequence[str] = (),
    shard_axis: str | Sequence[str] | None = None,
    replicate_axis: str | Sequence[str] | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    shard_dim_fn: ShardDimFn | None = None,
    ignored_params: Iterable[nnx.Variable[Any] | str] = (),
    strict: bool = False,
    prefetch: int = 1,
    flatten_below_bytes: int | None = None,
    pad_above_bytes: int = DEFAULT_PAD_ABOVE_BYTES,
) -> ModuleOrModules:
    """Shards the parameters of a module over a mesh axis and makes it a unit: gathered to compute, freed after.

    A unit takes all parameters below it that no inner unit reaches, whichever was wrapped first. In a training step:

        forward     all-gather the unit's parameters, in 1 + (number of large leaves) collectives; compute; free them
        backward    the same all-gathers again (unless `reshard_after_forward=False`), compute, and as many
                    reduce-scatters of the gradients; with replicas, an all-reduce of the shards over them

    A gather may start when the unit before begins to compute (`prefetch=1`), in the forward and in the backward, and
    travels under its matrix products. There, what reads a parameter outside a call of its unit is refused by name: it would
    find this device's part. (Not refused: `jax.tree.leaves(nnx.state(model))`, plain arrays, which are such parts.) Everywhere
    else (`model(x)` in a notebook, evaluation under `nnx.jit`) the module is the plain module on sharded arrays.

    Args:
        module: a Flax NNX module, concrete or abstract (`nnx.eval_shape`), or a list of modules that form one unit (they
            need a unit around them; all are gathered when the first is called). Changed in place.
        mesh: one axis, such as `mesh["dp"]`: shard over it. Two: replicate over the first, shard over the second
            (HSDP). Axes of other parallelism that parameters are split over already are kept; on the same dim the new
            axis varies fastest.
        units: globs of dotted module names that become units first, such as `"blocks.*"`: the short form of a loop
            that calls `fully_shard` on each.
        shard_axis: the axes that shard, by name, the first varying slowest.
        replicate_axis: the axes that replicate the shards.
        reshard_after_forward: True frees the parameters after the forward and gathers again in the backward (ZeRO-3);
            False keeps them (ZeRO-2); a number k keeps them sharded over the k ranks of the inner shard axes. Default:
            False for the whole model that a `TrainStep` trains and for units that contain units (the backward needs
            them at once), True for all others.
        mp_policy: dtypes that travel and compute.
        offload_policy: `CPUOffloadPolicy()` keeps parameters, and the state of an optimizer built from them, in host
            memory between steps.
        shard_dim_fn: `shard_dim_fn(name, array)` returns the dim to shard (`Shard(1)`, `1`), or None to choose as always: dim
            0 if it divides, else the largest that divides, else flat and padded (`pad_above_bytes`), else replicated.
            Layers stacked by `nnx.vmap` and run by `nnx.scan` are one unit; their first dim must stay whole: return 1.
        ignored_params: variables, or globs of their dotted names: they stay as they are.
        strict: a parameter that is not sharded (other than an ignored one) is an error.
        prefetch: how many units ahead gathers may start; 0: none.
        flatten_below_bytes: whole leaves smaller than this share one flat buffer. Default: all leaves, except between
            CPU devices of one process, where copies of large ones cost more than collectives.
        pad_above_bytes: a parameter of at least this size that no dim divides is stored flat and padded (see
            `sharding_report`); optimizers see one dim.

    Returns:
        `module`, the same object.

    Raises:
        ParallelizeError: a module that cannot be called, is wrapped already, or has no parameters; a glob that matches
            nothing; axes or a number that do not fit; a dim that does not divide; under `strict`, a parameter that
            is not sharded.

    Source: `torch.distributed.fsdp.fully_shard`, rows F1-F8; ZeRO (arXiv 1910.02054).

    Example:
        >>> from flax import nnx
        >>> from jaxpar.fsdp import fully_shard
        >>> from jaxpar.mesh import init_device_mesh
        >>> model = nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)])
        >>> mesh = init_device_mesh((8,), ("dp",))
        >>> model = fully_shard(model, mesh["dp"], units="layers.*")
        >>> model.layers[0].kernel.sharding.shard_shape((16, 16))
        (2, 16)
    """
    modules = [module] if isinstance(module, nnx.Module) else list(module)
    axes = resolve_axes(mesh, shard_axis, replicate_axis)
    unit = Unit(
        shard_axes=axes.shard,
        replicate_axes=axes.replicate,
        reshard=resolve_reshard(mesh, axes, reshard_after_forward),
        policy=mp_policy or MixedPrecisionPolicy(),
        prefetch=_checked_prefetch(prefetch),
        flatten_below_bytes=default_flatten_below_bytes(mesh)
        if flatten_below_bytes is None
        else flatten_below_bytes,
        send_as_integers=as_jax_mesh(mesh).devices.flat[0].platform == "cpu",
        group=Group() if len(modules) > 1 else None,
    )
    storage = Storage(
        mesh=as_jax_mesh(mesh),
        axes=axes.shard,
        shard_dim_fn=shard_dim_fn,
        ignored=tuple(ignored_params),
        pad_above_bytes=pad_above_bytes,
        is_on_host=offload_policy is not None,
    )
    inner = _matching(modules, (units,) if isinstance(units, str) else tuple(units))
    for each in modules:
        _check(each)
    storage.shard([pair for each in modules for pair in named_own_variables(each)], strict=strict)
    for each in [*inner, *modules]:
        if unit_of(each) is None:
            swap_class(each, "FSDP", call_unit, {UNIT: unit}, methods=_methods(each))
    return module


def register_fsdp_forward_method(module: nnx.Module, name: str) -> None:
    """Makes another method of a unit gather its parameters too, as its `__call__` does (row F31).

    In a training step, parameters of a unit are whole only inside the methods that gather them. `__call__` and all
    public methods of the module's own classes do so (`nnx.Embed.attend`); this is for a private or later added one.

    Args:
        module: a unit: something that `fully_shard` was called on. Changed in place.
        name: the method, such as `"_encode"`.

    Raises:
        ParallelizeError: the module is no unit, or has no such method.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.fsdp import fully_shard, register_fsdp_forward_method
        >>> from jaxpar.mesh import init_device_mesh
        >>> class Encoder(nnx.Linear):
        ...     def _encode(self, x):
        ...         return x @ self.kernel[...]
        >>> encoder = fully_shard(Encoder(8, 8, rngs=nnx.Rngs(0)), init_device_mesh((8,), ("dp",)))
        >>> register_fsdp_forward_method(encoder, "_encode")
    """
    if unit_of(module) is None:
        raise ParallelizeError(
            f"register_fsdp_forward_method: {type(module).__name__} is no unit, so it has nothing to gather. Call "
            f"fully_shard(module, mesh) first, or register the method of the unit around it."
        )
    if not callable(getattr(type(module), name, None)):
        raise ParallelizeError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {name!r}."
        )
    swap_class(module, "", call_unit, methods=(name,))


def _methods(module: nnx.Module) -> tuple[str, ...]:
    """`__call__` and the public methods that the module's own classes define (`nnx.Embed.attend`)."""
    own = [cls for cls in type(module).__mro__ if cls not in nnx.Module.__mro__]
    names = {name for cls in own for name, value in vars(cls).items() if inspect.isfunction(value)}
    return tuple(sorted(name for name in names if name == "__call__" or not name.startswith("_")))


def _check(module: nnx.Module) -> None:
    name = type(module).__name__
    if unit_of(module) is not None:
        raise ParallelizeError(f"fully_shard: {name} is a unit already. Call it once on each module.")
    if isinstance(module, nnx.List | nnx.Dict) or not callable(module):
        raise ParallelizeError(
            f"fully_shard: {name} is never called itself, so nothing would gather its parameters. Call it on each module "
            f"inside, as in fully_shard(model, mesh, units='blocks.*')."
        )
    if not nnx.to_flat_state(nnx.state(module, nnx.Param)):
        raise ParallelizeError(
            f"fully_shard: {name} has no parameters (nnx.Param): there is nothing to shard."
        )


def _checked_prefetch(prefetch: int) -> int:
    if prefetch < 0:
        raise ParallelizeError(
            f"fully_shard: prefetch={prefetch} is negative. Write 1 (the default), or 0 for none."
        )
    return prefetch


def _matching(modules: Sequence[nnx.Module], patterns: tuple[str, ...]) -> list[nnx.Module]:
    """The modules inside whose dotted name matches a pattern."""
    named = [(leaf_name_of(path), m) for module in modules for path, m in nnx.iter_modules(module) if path]
    found = []
    for pattern in patterns:
        now = [m for name, m in named if matches(name, pattern)]
        if not now:
            names = [name for name, _ in named]
            nearest = difflib.get_close_matches(pattern, names, n=4, cutoff=0.0)
            raise ParallelizeError(
                f"fully_shard: units={pattern!r} matches no module. The nearest names are {nearest}; '*' stands for one "
                f"segment of a dotted name, '**' for any number."
            )
        found += now
    for each in found:
        _check(each)
    return found


def leaf_name_of(path: tuple[Any, ...]) -> str:
    """A path of Flax as a dotted name."""
    return ".".join(str(part) for part in path)
