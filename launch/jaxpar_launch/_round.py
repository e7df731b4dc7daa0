"""One round of a job: which ranks live on this host, and where they meet.

    round 0    ranks 0..3 here, coordinator 127.0.0.1:40123      -- all are started together, all end together
    round 1    ...              coordinator 127.0.0.1:40877         a restart or new members: a new round

JAX cannot take a lost process back into a running job, so whatever changes the membership makes a new round
with a new coordinator. `recovery` is the address of one that outlives its workers (`--recover in-place`).
"""

from dataclasses import dataclass, field

from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.env import WorkerEnv


@dataclass(frozen=True, kw_only=True)
class Round:
    """The facts that all workers of one round share; `first_rank` is the rank of this host's local rank 0."""

    number: int
    restart_count: int
    world_size: int
    first_rank: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    store: str | None
    store_token: str | None
    recovery: str | None = None

    def worker_env(self, spec: LaunchSpec, *, local_rank: int, error_file: str) -> WorkerEnv:
        """The place of this host's worker `local_rank` in the round."""
        return WorkerEnv(
            rank=self.first_rank + local_rank,
            local_rank=local_rank,
            world_size=self.world_size,
            local_world_size=spec.nproc,
            group_rank=self.group_rank,
            group_world_size=self.group_world_size,
            role_name=spec.role,
            master_addr=self.master_addr,
            master_port=self.master_port,
            restart_count=self.restart_count,
            max_restarts=spec.max_restarts,
            run_id=spec.run_id,
            store=self.store,
            store_token=self.store_token,
            recovery=self.recovery,
            error_file=error_file,
            platform="cpu" if spec.platform == "cpu" else None,
            devices_per_proc=spec.devices_per_proc if spec.platform == "cpu" else None,
            local_device_ids=spec.local_device_ids(local_rank),
        )


@dataclass
class History:
    """What a job has been through: lines for its report, rounds (each has its log folder), restarts that count."""

    story: list[str] = field(default_factory=list)
    num_rounds: int = 0
    num_restarts: int = 0
