"""The worker of `jaxpar-launch --check`: do all hosts fit together, before a long job finds out that they do not?

    every rank    versions, devices, memory, clock  -> store -> rank 0: a table, and what is wrong with whom
    all           jax.distributed.initialize, a sum over all devices: does it come, is it right, how long does it take

Names and ports are checked by coming here at all: the launchers have met. It needs jax, and nothing of the job itself.
"""

import importlib.metadata
import os
import platform
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpar.debug._text import format_table
from jaxpar_launch.env import WorkerEnv
from jaxpar_launch.flight import heartbeat
from jaxpar_launch.store import StoreClient, StoreTimeoutError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "jaxpar")
EQUAL = ("python", *PACKAGES, "platform", "devices", "kind")
LEAST_MEMORY_GIB, MOST_SKEW_S = 1.0, 1.0
_LIMIT_S, _NUM_PINGS, _NUM_SUMS = 60.0, 5, 9


def main() -> int:
    """Checks; 1 if something is wrong."""
    worker = WorkerEnv.from_environ()
    if worker is None or worker.store is None or worker.store_token is None:
        print("this is the worker of `jaxpar-launch --check`; start that.", file=sys.stderr)
        return 2
    with StoreClient(worker.store, token=worker.store_token, timeout_s=_LIMIT_S) as store:
        heartbeat("check: clocks")
        skew_s = _serve_time(store, worker.world_size) if worker.rank == 0 else _skew_s(store, worker.rank)
        heartbeat("check: jax.distributed.initialize")
        if worker.world_size > 1:
            jax.distributed.initialize()
        heartbeat("check: devices")
        store.set(f"facts/{worker.rank}", facts(worker.rank, skew_s, jax.local_devices()))
        wrong: list[str] = []
        if worker.rank == 0:
            try:
                all_facts = store.get_many([f"facts/{rank}" for rank in range(worker.world_size)])
            except StoreTimeoutError as error:
                print(f"no answer from: {', '.join(error.missing)}", flush=True)
                return 1
            wrong = wrong_with(all_facts, asked=worker.devices_per_proc)
            print(table(all_facts), flush=True)
            store.set("wrong", wrong)
        wrong = store.get("wrong")
        heartbeat("check: a sum over all devices")
        text, is_right = _sum()
        if worker.rank == 0:
            print(text, *(f"wrong: {line}" for line in wrong), sep="\n", flush=True)
            print("all is well" if is_right and not wrong else "do not start a job yet", flush=True)
    return int(bool(wrong) or not is_right)


def facts(rank: int, skew_s: float, devices: Sequence[Any]) -> dict[str, Any]:
    """What one rank says of itself."""
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        **versions,
        "platform": devices[0].platform,
        "devices": len(devices),
        "kind": devices[0].device_kind,
        "memory_gib": _free_memory_gib(),
        "skew_s": skew_s,
    }


def wrong_with(all_facts: Sequence[dict[str, Any]], *, asked: int | None) -> list[str]:
    """What does not fit, and with whom.

    Args:
        all_facts: of every rank.
        asked: how many devices each worker should have; None: as many as the others.
    """
    wrong = []
    for name in EQUAL:
        usual = Counter(str(fact[name]) for fact in all_facts).most_common(1)[0][0]
        for fact in all_facts:
            if str(fact[name]) != usual:
                wrong.append(f"{_who(fact)} has {name} {fact[name]}, the others {usual}")
    for fact in all_facts:
        if asked is not None and fact["devices"] != asked:
            wrong.append(
                f"{_who(fact)} sees {fact['devices']} devices, --devices-per-proc {asked} asked for {asked}"
            )
        if fact["memory_gib"] is not None and fact["memory_gib"] < LEAST_MEMORY_GIB:
            wrong.append(f"{_who(fact)} has {fact['memory_gib']:.1f} GiB of memory left")
        if abs(fact["skew_s"]) > MOST_SKEW_S:
            wrong.append(f"the clock of {_who(fact)} is {fact['skew_s']:+.1f} s off that of rank 0")
    return wrong


def table(all_facts: Sequence[dict[str, Any]]) -> str:
    """For people; what is equal everywhere stands once."""
    equal = [name for name in EQUAL if len({str(fact[name]) for fact in all_facts}) == 1]
    head = ", ".join(f"{name} {all_facts[0][name]}" for name in equal if all_facts[0][name] is not None)
    others = [name for name in EQUAL if name not in equal]
    rows = []
    for fact in all_facts:
        memory = "" if fact["memory_gib"] is None else f"{fact['memory_gib']:.1f} GiB"
        rows.append(
            (
                str(fact["rank"]),
                fact["host"],
                *(str(fact[name]) for name in others),
                memory,
                f"{fact['skew_s'] * 1e3:+.1f} ms",
            )
        )
    header = ("rank", "host", *others, "memory", "clock")
    return f"{len(all_facts)} workers, all with {head}\n{format_table(header, rows)}"


def _who(fact: dict[str, Any]) -> str:
    return f"rank {fact['rank']} on {fact['host']}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free_memory_gib() -> float | None:
    """What Linux could give a process now."""
    try:
        with open("/proc/meminfo") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return kib / (1 << 20)


def _serve_time(store: StoreClient, world_size: int) -> float:
    """Rank 0's clock, for one rank after the other."""
    for rank in range(1, world_size):
        for ping in range(_NUM_PINGS):
            store.wait([f"ping/{rank}/{ping}"])
            store.set(f"pong/{rank}/{ping}", time.time())
    return 0.0


def _skew_s(store: StoreClient, rank: int) -> float:
    """How far this clock is ahead of rank 0's: by the quickest answer, half of its way each way."""
    answers = []
    for ping in range(_NUM_PINGS):
        start_s = time.time()
        store.set(f"ping/{rank}/{ping}", True)
        there_s = store.get(f"pong/{rank}/{ping}")
        end_s = time.time()
        answers.append((end_s - start_s, (start_s + end_s) / 2 - there_s))
    return min(answers[1:])[1]  # the first waited for its turn


def _sum() -> tuple[str, bool]:
    """One number of each device, summed by all."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec("all"), out_specs=spec()
    )
    ones = jax.make_array_from_callback(
        (len(mesh.devices),),
        jax.sharding.NamedSharding(mesh, spec("all")),
        lambda index: np.ones(len(mesh.devices), np.float32)[index],
    )
    run = jax.jit(mapped)
    total = float(run(ones)[0])
    seconds = []
    for _ in range(_NUM_SUMS):
        start_s = time.perf_counter()
        jax.block_until_ready(run(ones))
        seconds.append(time.perf_counter() - start_s)
    is_right = total == len(mesh.devices)
    right = "" if is_right else f", but the result is {total:g}"
    return (
        f"a sum over {len(mesh.devices)} devices takes {statistics.median(seconds) * 1e3:.2f} ms{right}",
        is_right,
    )


if __name__ == "__main__":
    code = main()
    if code:
        os._exit(code)  # the other ranks know: nobody waits in a shutdown barrier
