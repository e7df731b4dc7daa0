"""The one quarantine: what differs between JAX versions, and every semi-public name that jaxpar needs."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core
from jax.interpreters import ad, batching, mlir, partial_eval

SERVICE_HEARTBEAT_S = 100  # as in _compat_service.py, which cannot import this file


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual axes over which a value of this type varies; JAX renamed the attribute after 0.9."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else aval.vma)


def jax_version() -> str:
    """The version of JAX, for messages and comparisons between processes."""
    return jax.__version__


def backend_is_started() -> bool:
    """Whether JAX has started a backend in this process; asking does not start one."""
    from jax._src import xla_bridge  # no public name tells without starting one (jax 0.10 to 0.12)

    return xla_bridge.backends_are_initialized()


def detect_cluster(timeout_s: float) -> tuple[str, int, int, tuple[int, ...] | None] | None:
    """What Slurm, Open MPI, Kubernetes or a TPU pod says of this process, as JAX detects it.

    Returns:
        Coordinator address, number of processes, rank, local device ids; None outside any cluster JAX knows.
    """
    from jax._src.clusters import ClusterEnv  # `jax.distributed.initialize` detects, but does not tell

    found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(timeout_s))
    address, world_size, rank, device_ids = found
    if address is None or world_size is None or rank is None:
        return None
    return address, world_size, rank, None if device_ids is None else tuple(device_ids)


def connect_to_service(address: str, *, rank: int, world_size: int, timeout_s: int) -> None:
    """As `jax.distributed.initialize`, with a service that somebody else hosts (`_compat_service.py`); jax 0.10 to 0.12.

    The public one starts the service inside rank 0, and jaxlib ends every process whose service goes.
    """
    from jax._src import distributed
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    state = distributed.global_state
    assert state.client is None, "the old world was not left"
    state.coordinator_address, state.process_id, state.num_processes = address, rank, world_size
    client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=timeout_s, use_compression=True, heartbeat_timeout=SERVICE_HEARTBEAT_S
    )
    client.connect()
    state.client = client


def leave_jax() -> None:
    """Leaves a world that lost a process: client, backend, compiled programs. Arrays of this process stay readable.

    Only with a recoverable service: another one waits in its shutdown barrier and then aborts the process.
    """
    import contextlib

    from jax.extend import backend

    with contextlib.suppress(RuntimeError):  # the service is gone, and with it all that there was to leave
        jax.distributed.shutdown()
    backend.clear_backends()
    _restart_orbax_counters()


def start_only_backend() -> int:
    """Starts the backend of the world that was joined, in place of any other; returns its number of processes.

    A thread of the old world, such as Orbax's that writes a checkpoint, may have asked JAX something after `leave_jax`: that
    started a backend which knows this process only.
    """
    from jax.extend import backend

    if backend_is_started():
        backend.clear_backends()
    return jax.process_count()


def _restart_orbax_counters() -> None:
    """Orbax (0.12) names its barriers by a count of saves in this process; a new process begins at zero, so all do."""
    import itertools
    import sys

    if module := sys.modules.get("orbax.checkpoint._src.futures.synchronization"):
        module.OperationIdGenerator._operation_id_counter = itertools.count()
        module.OperationIdGenerator.next_operation_id()


def needs_large_first_collective() -> bool:
    """Whether Gloo stalls 40 ms at a time unless a clique's first collective is large (seen on 0.10, not on 0.12)."""
    return jax.__version_info__ < (0, 12) and jax.default_backend() == "cpu"


class ProgramStore(Protocol):
    """Where compiled programs are kept, by a text that names all they depend on."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, program: bytes) -> None: ...


def keep_programs(open_store: Callable[[], ProgramStore], *, folder: str) -> None:
    """Makes JAX's persistent compilation cache serve every process from a store of ours; call it before any program.

    JAX (0.10 to 0.12) makes the key and looks it up on every process, but only process 0 writes, and its own files are
    neither written whole nor checked. Public are the folder's name and the reset; the store and the writer are not. The
    store is opened with the first program, when the devices are known.

    On GPUs JAX's rule stays, and process 0 writes for all: two compilations of one program need not give the same
    binary there (autotuning), and processes that run different ones deadlock.
    """
    from jax._src import compilation_cache, compiler
    from jax.experimental.compilation_cache import compilation_cache as public

    jax_writes = inspect.unwrap(compiler._cache_write)

    def write(*program: Any) -> None:
        key, compile_time_s, name, backend, executable, *host_callbacks = program
        if backend.platform == "gpu" or any(host_callbacks):
            return jax_writes(*program)
        try:
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(compile_time_s))
        except Exception as error:  # of the runtime, which may know no way to serialise this program
            warnings.warn(f"kept programs: {name} cannot be kept: {error}", RuntimeWarning, stacklevel=2)

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    public.reset_cache()
    compiler._cache_write = functools.update_wrapper(write, jax_writes)
    compilation_cache.get_file_cache = lambda path: (_KeptCache(open_store(), path), path)


class _KeptCache:
    """A store in the form that JAX calls."""

    def __init__(self, store: ProgramStore, path: str) -> None:
        self.get, self.put, self._path = store.get, store.put, path


def world_of_programs() -> str:
    """What no compiled program may outlive: JAX, the processes, and their devices. JAX's own keys hold less.

    On GPUs one program serves all processes, so there it does not tell them apart.
    """
    devices = [(device.id, device.process_index, device.device_kind) for device in jax.devices()]
    rank = "any" if jax.default_backend() == "gpu" else jax.process_index()
    return f"jax {jax.__version__}, process {rank} of {jax.process_count()}, devices {devices}"


def compiler_options(platform: str, *, num_at_once: int = 2) -> dict[str, int]:
    """XLA's options for a training step: on GPUs a gather and a reduce-scatter may be under way at once.

    That is as on PyTorch's two streams. With XLA's default of 1, a block's whole time is given to one of them: at 64
    H100s, jax 0.12 puts 0.51 of the collective bytes under matmuls, and 0.92 with 2.
    """
    return (
        {"xla_gpu_experimental_parallel_collective_overlap_limit": num_at_once} if platform == "gpu" else {}
    )


def forget_axes(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Type a value as equal over axes, unchecked: no operation at all in the compiled program.

    True over axes of size 1, where JAX's only way is a `psum` over one device, which XLA:CPU does not remove (jax
    0.12); and harmless for a number whose value nobody uses.
    """
    present = tuple(name for name in names if name in varying_axes(jax.typeof(x)))
    return _forget_axes_p.bind(x, names=present) if present else x


def _forget_axes_type(aval: Any, *, names: tuple[str, ...]) -> Any:
    manual = aval.manual_axis_type
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - set(names)))


_forget_axes_p = jax.extend.core.Primitive("forget_axes")
_forget_axes_p.def_abstract_eval(_forget_axes_type)
mlir.register_lowering(_forget_axes_p, lambda ctx, x, *, names: [x])
ad.deflinear2(_forget_axes_p, lambda ct, x, *, names: [jax.lax.pcast(ct, names, to="varying")])
batching.defvectorized(_forget_axes_p)


def trace_state() -> Any:
    """What tells one trace from another: a traced value may be used where the state equals that of its birth."""
    return jax.extend.core.get_opaque_trace_state(convention="jaxpar")


def without_unused(jaxpr: Any, used_outputs: list[bool]) -> tuple[Any, list[bool]]:
    """Returns the part of a jaxpr that the chosen outputs need, and which inputs that part needs."""
    return partial_eval.dce_jaxpr(jaxpr, used_outputs)


def as_function(jaxpr: Any, consts: Any) -> Callable[..., list[jax.Array]]:
    """Returns a jaxpr as a function of flat arrays."""
    return jax.extend.core.jaxpr_as_fun(closed(jaxpr, consts))


def closed(jaxpr: Any, consts: Any) -> Any:
    """A jaxpr with its constants."""
    return jax.extend.core.ClosedJaxpr(jaxpr, consts)


def mark_stage(x: jax.Array, index: int) -> jax.Array:
    """Mark a value as what enters pipeline stage `index`: the identity, which shows in a traced program."""
    return _mark_stage_p.bind(x, index=index)


def marked_stage(equation: Any) -> int | None:
    """Which stage the equation marks the entry of; None if it is no such mark."""
    return equation.params["index"] if equation.primitive is _mark_stage_p else None


_mark_stage_p = jax.extend.core.Primitive("mark_stage")
_mark_stage_p.def_abstract_eval(lambda x, *, index: x)
_mark_stage_p.def_impl(lambda x, *, index: x)
mlir.register_lowering(_mark_stage_p, lambda ctx, x, *, index: [x])
ad.deflinear2(_mark_stage_p, lambda ct, x, *, index: [ct])
batching.defvectorized(_mark_stage_p)


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a constant written into it."""
    return isinstance(atom, jax.extend.core.Literal)


def sub_program(jaxpr: Any, inputs: Sequence[Any], outputs: Sequence[Any], equations: Sequence[Any]) -> Any:
    """The jaxpr of some equations of another one, with variables of that one as inputs and outputs; same constants."""
    return jaxpr.replace(
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
