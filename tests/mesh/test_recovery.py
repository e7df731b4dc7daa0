"""What is kept over the loss of a worker comes back bit for bit; connections to the others, and no more, are cut."""

import re
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import _compat
from jaxpar._errors import ProcessGroupError, RecoveryError, WorkerLostError
from jaxpar.mesh import Recovery, _recoverable, init_device_mesh, run_recoverable, warm_up
from jaxpar.mesh._coordinator import _join_service
from jaxpar.mesh._cut import cut
from jaxpar.mesh._group import Membership, ProcessGroup, group_slot
from jaxpar.mesh._host_copy import copy_to_host, restored
from jaxpar.mesh._warm_up import _warm_up_once


@pytest.fixture
def group() -> ProcessGroup:
    """A world of one, which can be recovered as others can."""
    return ProcessGroup(Membership(0, 1, recoverable=True), timeout_s=5, shutdown_timeout_s=5)


def states(mesh) -> tuple[dict, dict]:
    """A state of all kinds of leaves, and one of its shape with nothing in it."""
    whole = NamedSharding(mesh, P())
    put = lambda x: jax.device_put(x, whole)  # noqa: E731
    odd = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    state = {
        "w": put(odd),
        "half": put(jnp.asarray(odd, jnp.bfloat16)),
        "mask": put(np.array([True, False])),
        "key": put(jax.random.key(7)),
        "count": put(np.int32(-3)),
        "empty": put(np.zeros((0, 2), np.float32)),
        "host": np.arange(3),
        "epoch": 5,
    }
    fresh = {
        name: put(jax.random.key(0))
        if name == "key"
        else put(leaf * 0)
        if hasattr(leaf, "sharding")
        else leaf * 0
        for name, leaf in state.items()
        if name != "mask"
    }
    fresh["mask"] = put(np.zeros(2, bool))
    return state, fresh


def bits(x) -> bytes:
    return np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key) else x
    ).tobytes()


def test_a_state_comes_back_bit_for_bit_and_where_it_was(group: ProcessGroup) -> None:
    state, fresh = states(init_device_mesh((8,), ("dp",)).jax_mesh)
    run = Recovery(group)
    run.keep(12, state)
    steps, found = Recovery(group, kept=run.kept, restart_count=1).resume(fresh)
    assert steps == 12
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert {name: bits(leaf) for name, leaf in found.items()} == {
        name: bits(leaf) for name, leaf in state.items()
    }
    for name in ("w", "half", "mask", "key", "count", "empty"):
        assert found[name].sharding.is_equivalent_to(state[name].sharding, state[name].ndim), name
        assert found[name].dtype == state[name].dtype


def test_what_is_kept_does_not_change_with_the_state(group: ProcessGroup) -> None:
    run = Recovery(group)
    array, host = jnp.ones(4), np.ones(4)
    run.keep(1, [array, host])
    host += 1
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert run.kept is not None
    np.testing.assert_array_equal(run.kept.leaves, np.ones((2, 4)))


def test_a_state_may_be_taken_up_sharded() -> None:
    mesh = init_device_mesh((8,), ("dp",)).jax_mesh
    kept = copy_to_host(1, {"w": np.arange(16.0, dtype=np.float32)})
    sharding = NamedSharding(mesh, P("dp"))
    found = restored(kept, {"w": jnp.zeros(16, device=sharding)}, source=0)
    assert found["w"].sharding == sharding
    np.testing.assert_array_equal(found["w"], np.arange(16.0))


def test_without_a_copy_the_checkpoint_counts_or_the_fresh_state(group: ProcessGroup) -> None:
    assert Recovery(group).resume("fresh") == (0, "fresh")
    assert Recovery(group).resume("fresh", otherwise=lambda: (40, "loaded")) == (40, "loaded")
    kept = copy_to_host(3, [np.ones(2)])
    steps, _ = Recovery(group, kept=kept).resume([np.zeros(2)], otherwise=lambda: (40, "loaded"))
    assert steps == 3


def test_sharded_state_cannot_be_kept(group: ProcessGroup) -> None:
    mesh = init_device_mesh((8,), ("dp",)).jax_mesh
    state = {"layer": {"kernel": jnp.zeros(8, device=NamedSharding(mesh, P("dp")))}, "bias": jnp.zeros(2)}
    with pytest.raises(RecoveryError, match=re.escape("Recovery.keep: layer.kernel (8,) is sharded, ")):
        Recovery(group).keep(1, state)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"w": np.zeros(3)}, "w is float64[3], but kept was w, float64[2]"),
        ({"v": np.zeros(2)}, "v is float64[2], but kept was w, float64[2]"),
        ({"w": np.zeros(2), "x": 0}, "the state has 2 leaves, but 1 were kept"),
    ],
)
def test_another_state_than_was_kept_is_refused(other: dict, said: str, group: ProcessGroup) -> None:
    kept = copy_to_host(1, {"w": np.zeros(2)})
    with pytest.raises(RecoveryError, match=re.escape(f"Recovery.resume: {said}")):
        Recovery(group, kept=kept).resume(other)


def test_a_broken_world_is_left_at_every_safe_point(group: ProcessGroup) -> None:
    group.break_up()
    run = Recovery(group)
    for safe_point in (run.check, lambda: run.keep(1, 0), lambda: run.resume(0)):
        with pytest.raises(
            WorkerLostError, match="Let this error pass: run_recoverable calls its function again"
        ):
            safe_point()


def test_alone_it_is_a_call() -> None:
    def train(run: Recovery) -> int:
        run.keep(1, 0)
        run.check()
        return run.resume(41)[1] + run.restart_count + 1

    assert run_recoverable(train) == 42


def test_nothing_cached_outlives_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _recoverable._CACHING[0] == "jaxpar."
    # Of these two only: other tests may hold what is cached.
    monkeypatch.setattr(_recoverable, "_CACHING", ("jaxpar.mesh._warm_up", "jaxpar.mesh._group"))
    mesh = init_device_mesh((8,), ("dp",))
    warm_up(mesh)
    slot = group_slot()
    assert _warm_up_once.cache_info().currsize > 0
    _recoverable._forget_caches()
    assert _warm_up_once.cache_info().currsize == 0
    assert group_slot() is slot  # who this process is, is no cache


def test_a_backend_of_this_process_alone_is_noticed() -> None:
    with pytest.raises(
        ProcessGroupError, match="JAX sees 1 of 2 processes .this is rank 0.: a thread of the world before"
    ):
        _recoverable._check_whole(1, Membership(0, 2))


def test_a_service_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such task")

    monkeypatch.setattr(_compat, "connect_to_service", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        member = Membership(1, 2, coordinator_address=address, recoverable=True)
        with pytest.raises(
            ProcessGroupError, match=f"rank 1 cannot join the coordination service at {address}: no such task"
        ):
            _join_service(member, time.monotonic() + 5)


CHILD = """
import socket, sys
to_parent, own = socket.create_connection(("127.0.0.1", int(sys.argv[1]))), socket.create_server(("127.0.0.1", 0))
print(own.getsockname()[1], flush=True)
connection, _ = own.accept()
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_connections_to_the_other_workers_are_cut_and_no_others() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(server.getsockname()[1])], stdin=-1, stdout=-1, text=True
        ) as child,
    ):
        accepted, _ = server.accept()
        assert child.stdout is not None
        connected = socket.create_connection(("127.0.0.1", int(child.stdout.readline())))
        left, right = socket.socketpair()
        mine = socket.create_connection(server.getsockname())  # both ends are this process's
        ends = (accepted, connected)
        try:
            assert cut([child.pid]) == 2
            for end in ends:
                end.settimeout(5)
                assert end.recv(1) == b""
            left.sendall(b"x")
            assert right.recv(1) == b"x"
            mine.sendall(b"x")
        finally:
            for each in (*ends, left, right, mine):
                each.close()
            child.communicate("")
