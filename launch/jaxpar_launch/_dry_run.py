"""What would be started, as lines that can be read, compared, and pasted into a shell.

Drawn when the job starts, and so shown by name here: a free port (PORT), the store's address and secret.
"""

import shlex
from collections.abc import Mapping

from jaxpar_launch._agent import round_of_one_host, worker_environ
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.env import WorkerEnv

_PORT_STAND_IN = 1


def dry_run_text(spec: LaunchSpec, inherited: Mapping[str, str]) -> str:
    """One block per worker: the variables it gets beside the inherited ones, then its command line."""
    round_ = round_of_one_host(
        spec, number=0, master_port=spec.master_port or _PORT_STAND_IN, store="127.0.0.1:1", token="SECRET"
    )
    return "\n\n".join(
        _block(spec, round_.worker_env(spec, local_rank=local_rank, error_file="ERROR_FILE"), inherited)
        for local_rank in range(spec.nproc)
    )


def _block(spec: LaunchSpec, env: WorkerEnv, inherited: Mapping[str, str]) -> str:
    environ = worker_environ(spec, env, inherited)
    environ |= {"JAXPAR_STORE": "127.0.0.1:STORE_PORT"}
    if spec.master_port is None:
        address = f"{spec.master_addr}:PORT"
        environ |= {"MASTER_PORT": "PORT", "JAXPAR_COORDINATOR": address, "JAX_COORDINATOR_ADDRESS": address}
        environ |= {"OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address}"}
    new = {name: value for name, value in environ.items() if inherited.get(name) != value}
    variables = [f"{name}={shlex.quote(value)} \\" for name, value in sorted(new.items())]
    return "\n".join(
        [f"# rank {env.rank} of {env.world_size}", *variables, shlex.join(spec.argv("ERROR_FILE"))]
    )
