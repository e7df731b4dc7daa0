"""Where and with how many other hosts a job meets, from torchrun's options.

--nnodes 2              two hosts, no more and no fewer      --nnodes 2:4   as many as come, two at least
--rdzv-endpoint a:29400         the first of them to listen there serves the others; of etcd also https://a:2379
--node-rank 1 --master-addr a --master-port 29400            the same, with places given by hand ("static")
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxpar_launch._errors import LaunchSpecError, WorkerEnvError
from jaxpar_launch._etcd_access import OTHER_NAMES, EtcdAccess
from jaxpar_launch.env import split_address

BACKENDS = {"tcp": "tcp", "c10d": "tcp", "static": "tcp", "etcd": "etcd", "etcd-v2": "etcd"}
DEFAULT_PORT, ETCD_PORT = 29400, 2379
_LINE = "jaxpar-launch --nnodes 2 --rdzv-endpoint node0:29400 --nproc-per-node 4 train.py"


@dataclass(frozen=True, kw_only=True)
class RendezvousConf:
    """Seconds, as torchrun names them (row E8), and how etcd is reached.

    Args:
        join_timeout: how long to wait for the least number of hosts.
        last_call_timeout: how long to wait for more, once they are there.
        keep_alive_interval: between two signs of life of a launcher.
        keep_alive_max_attempt: how many may be missing before it is taken for lost.
        etcd: with TLS, and as which user, if etcd keeps the meeting.
    """

    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    keep_alive_interval: float = 1.0
    keep_alive_max_attempt: float = 5.0
    etcd: EtcdAccess = EtcdAccess()

    @property
    def patience_s(self) -> float:
        """How long a launcher may be silent."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @classmethod
    def parse(cls, text: str, *, protocol: str | None = None) -> "RendezvousConf":
        """From "name=value,name=value".

        Args:
            text: as on the command line.
            protocol: "http" or "https", if the endpoint said so.

        Raises:
            LaunchSpecError: another name, no number, or a file that is not there.

        Example:
            >>> RendezvousConf.parse("join_timeout=60").join_timeout
            60.0
        """
        seconds, access = (_names(kind) for kind in (cls, EtcdAccess))
        values: dict[str, float] = {}
        words: dict[str, str] = {} if protocol is None else {"protocol": protocol}
        for part in filter(None, text.split(",")):
            name, _, value = (word.strip() for word in part.partition("="))
            name = OTHER_NAMES.get(name, name)
            if name == "password":
                raise LaunchSpecError(
                    "--rdzv-conf password=...: everybody on this host can read a command line. Put it into JAXPAR_ETCD_PASSWORD, or into "
                    "a file: password_file=FILE."
                )
            if name in access and value:
                if name == "protocol" and protocol not in (None, value):
                    raise LaunchSpecError(
                        f"--rdzv-conf protocol={value} contradicts --rdzv-endpoint {protocol}://...: leave it out."
                    )
                words[name] = value
                continue
            try:
                if name not in seconds or not 0 < float(value) < float("inf"):
                    raise ValueError(part)
            except ValueError:
                raise LaunchSpecError(
                    f"--rdzv-conf {part}: not name=seconds with a name of {', '.join(seconds)}, nor, for etcd, one of "
                    f"{', '.join(access)} with its value. Write for example --rdzv-conf join_timeout=60,last_call_timeout=5."
                ) from None
            values[name] = float(value)
        return cls(**values, etcd=EtcdAccess(**words))


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "etcd"]


@dataclass(frozen=True, kw_only=True)
class RendezvousSpec:
    """A meeting of several hosts.

    Args:
        endpoint: "host:port" where they meet; of etcd perhaps several, with commas.
        backend: "tcp", or "etcd".
        least: how many hosts are enough.
        most: how many take part.
        node_rank: this host's place, if it is given by hand.
        local_addr: at which the others reach this host, if it is given by hand.
        conf: how long to wait for what.

    Raises:
        LaunchSpecError: an endpoint without a port, or numbers of hosts that no job can have.
    """

    endpoint: str
    least: int
    most: int
    node_rank: int | None = None
    local_addr: str | None = None
    conf: RendezvousConf = field(default_factory=RendezvousConf)
    backend: str = "tcp"

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise LaunchSpecError(
                f"a meeting of least={self.least} to most={self.most} hosts cannot be: 1 <= least <= most."
            )
        if self.backend != "etcd" and self.conf.etcd != EtcdAccess():
            raise LaunchSpecError(
                "--rdzv-conf: protocol, certificates and users are those of etcd. Add --rdzv-backend etcd, or leave them out."
            )
        try:
            for part in self.endpoint.split(","):
                if "://" in part:
                    raise LaunchSpecError(
                        f"endpoint={part!r} is no host:port. Write conf=RendezvousConf(etcd=EtcdAccess(protocol='https')) beside it."
                    )
                split_address(part, variable="endpoint")
        except WorkerEnvError as error:
            raise LaunchSpecError(str(error)) from None


def rendezvous_of(options: Mapping[str, Any]) -> RendezvousSpec | None:
    """The meeting that the options describe; None for one host alone.

    Args:
        options: nnodes, node_rank, rdzv_backend, rdzv_endpoint, rdzv_conf, master_addr, master_port, local_addr.

    Raises:
        LaunchSpecError: no endpoint, no such backend, or numbers that do not fit.

    Example:
        >>> rendezvous_of({"nnodes": "2:4", "rdzv_endpoint": "a"})
        RendezvousSpec(endpoint='a:29400', least=2, most=4, ...
    """
    least, most = _nodes(options.get("nnodes") or "1")
    node_rank = _node_rank(options.get("node_rank"), most)
    backend = options.get("rdzv_backend")
    if backend is not None and backend not in BACKENDS:
        raise LaunchSpecError(
            f"--rdzv-backend {backend}: there is {', '.join(BACKENDS)}, slurm. Leave it out for tcp, which the first host serves itself."
        )
    endpoint = options.get("rdzv_endpoint")
    if not endpoint and most > 1 and options.get("master_addr"):
        endpoint = f"{options['master_addr']}:{options.get('master_port') or DEFAULT_PORT}"
        if node_rank is None:
            raise LaunchSpecError(
                f"--nnodes {most} with --master-addr needs --node-rank too, a different one on each host; or write "
                f"--rdzv-endpoint {endpoint} in place of both."
            )
    if not endpoint:
        if most == 1:
            return None
        raise LaunchSpecError(f"--nnodes {options['nnodes']} needs a place to meet: {_LINE}")
    kind = BACKENDS[backend or "tcp"]
    port = ETCD_PORT if kind == "etcd" else DEFAULT_PORT
    protocol, hosts = _protocol_of(endpoint)
    parts = [part if ":" in part and not part.endswith("]") else f"{part}:{port}" for part in hosts]
    if len(parts) > 1 and kind != "etcd":
        raise LaunchSpecError(
            f"--rdzv-endpoint {endpoint}: one place to meet; several are for --rdzv-backend etcd."
        )
    return RendezvousSpec(
        endpoint=",".join(parts),
        backend=kind,
        least=least,
        most=most,
        node_rank=node_rank,
        local_addr=options.get("local_addr"),
        conf=RendezvousConf.parse(options.get("rdzv_conf") or "", protocol=protocol),
    )


def _protocol_of(endpoint: str) -> tuple[str | None, list[str]]:
    """What stands before "://" in an endpoint, or None, and the hosts."""
    pairs = [part.strip().rstrip("/").rpartition("://") for part in endpoint.split(",")]
    protocols = {scheme for scheme, _, _ in pairs}
    if len(protocols) > 1:
        raise LaunchSpecError(
            f"--rdzv-endpoint {endpoint}: all servers of one etcd speak the same. Write https:// before each of them, or before none and "
            "--rdzv-conf protocol=https."
        )
    return protocols.pop() or None, [host for _, _, host in pairs]


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdigit() or not (most or least).isdigit() or not 0 < int(least) <= int(most or least):
        raise LaunchSpecError(
            f"--nnodes {text} is neither a number of hosts nor MIN:MAX, as in --nnodes 2:4."
        )
    return int(least), int(most or least)


def _node_rank(text: str | None, most: int) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) >= most:
        raise LaunchSpecError(f"--node-rank {text} does not lie in 0..{most - 1}, with --nnodes {most}.")
    return int(text)
