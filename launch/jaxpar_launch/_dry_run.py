"""What would be started, as lines that can be read, compared, and pasted into a shell.

Drawn when the job starts, and so shown by name here: a free port (PORT), the store's address and secret. Of several hosts
the full number is shown, each with as many workers as this one, which takes the first place unless --node-rank says another.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace

from jaxpar_launch._agent import worker_environ
from jaxpar_launch._alone import round_of_one_host
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.env import WorkerEnv, split_address

_PORT_STAND_IN = 1


def dry_run_text(spec: LaunchSpec, inherited: Mapping[str, str]) -> str:
    """One block per worker: the variables it gets beside the inherited ones, then its command line."""
    round_ = round_of_one_host(
        spec,
        number=0,
        restart_count=0,
        master_port=spec.master_port or _PORT_STAND_IN,
        store="127.0.0.1:1",
        token="SECRET",
    )
    if (meeting := spec.rendezvous) is not None:
        group_rank = meeting.node_rank or 0
        round_ = replace(
            round_,
            world_size=spec.nproc * meeting.most,
            group_rank=group_rank,
            group_world_size=meeting.most,
            first_rank=spec.nproc * group_rank,
            master_addr="FIRST_HOST"
            if meeting.backend == "etcd"
            else split_address(meeting.endpoint, variable="--rdzv-endpoint")[0],
        )
    return "\n\n".join(
        _block(spec, round_.worker_env(spec, local_rank=local_rank, error_file="ERROR_FILE"), inherited)
        for local_rank in range(spec.nproc)
    )


def _block(spec: LaunchSpec, env: WorkerEnv, inherited: Mapping[str, str]) -> str:
    environ = worker_environ(spec, env, inherited)
    environ |= {"JAXPAR_STORE": f"{env.master_addr if spec.rendezvous else '127.0.0.1'}:STORE_PORT"}
    if spec.master_port is None or spec.rendezvous is not None:
        address = f"{env.master_addr}:PORT"
        environ |= {"MASTER_PORT": "PORT", "JAXPAR_COORDINATOR": address, "JAX_COORDINATOR_ADDRESS": address}
        environ |= {"OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}"}
    new = {name: value for name, value in environ.items() if inherited.get(name) != value}
    variables = [f"{name}={shlex.quote(value)} \\" for name, value in sorted(new.items())]
    return "\n".join(
        [
            f"# rank {env.rank} of {env.world_size}",
            *variables,
            shlex.join(spec.argv("ERROR_FILE", local_rank=env.local_rank)),
        ]
    )
