"""jaxpar-launch: starts, watches and explains a group of worker processes. Standard library only."""

from jaxpar_launch import timer as timer
from jaxpar_launch._api import LaunchResult as LaunchResult
from jaxpar_launch._api import launch as launch
from jaxpar_launch._errors import LaunchFailedError as LaunchFailedError
from jaxpar_launch._errors import LaunchSpecError as LaunchSpecError
from jaxpar_launch._errors import LaunchTimeoutError as LaunchTimeoutError
from jaxpar_launch._errors import RendezvousError as RendezvousError
from jaxpar_launch._errors import WorkerEnvError as WorkerEnvError
from jaxpar_launch._etcd_access import EtcdAccess as EtcdAccess
from jaxpar_launch._rdzv_spec import RendezvousConf as RendezvousConf
from jaxpar_launch._rdzv_spec import RendezvousSpec as RendezvousSpec
from jaxpar_launch._report import Failure as Failure
from jaxpar_launch._spec import LaunchSpec as LaunchSpec
from jaxpar_launch._streams import StreamChoice as StreamChoice
from jaxpar_launch.flight import heartbeat as heartbeat
