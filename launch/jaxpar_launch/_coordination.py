"""JAX's coordination services in a process of their own: the loss of rank 0 is then the loss of a worker as any other.

    launcher --pipe--> python jaxpar/_compat_service.py     one service for each world, at a port of its own
                       the pipe closes = the launcher is gone or done --> it ends

JAX starts the service inside rank 0, and ends every other process when it goes. The launcher itself knows no jax, so the
helper is jaxpar's. Services of earlier worlds stay: a survivor that has not yet left one would be ended with it.
"""

import contextlib
import subprocess
from collections.abc import Mapping

from jaxpar_launch._ports import PortReservation
from jaxpar_launch.env import join_address

# Finding a package does not import it: the helper starts without jax, flax and jaxpar's own modules.
_PROGRAM = (
    "import importlib.util, runpy\n"
    "folder = importlib.util.find_spec('jaxpar').submodule_search_locations[0]\n"
    "runpy.run_path(folder + '/_compat_service.py', run_name='__main__')"
)
_END_S = 5.0


class CoordinationServices:
    """The helper process and the ports of its services.

    Args:
        python: the interpreter of the workers.
        environ: its environment.
    """

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        self._ports: list[PortReservation] = []
        self._process = subprocess.Popen(
            [python, "-c", _PROGRAM],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def open(self, host: str, *, world_size: int) -> str | None:
        """Has a service started for one more world; returns its address at once, None if the helper has ended."""
        assert self._process.stdin is not None
        self._ports.append(PortReservation.draw(host))
        address = join_address(host, self._ports[-1].port)
        try:
            self._process.stdin.write(f"{address} {world_size}\n")
            self._process.stdin.flush()
        except OSError:
            return None
        return address if self._process.poll() is None else None

    def close(self) -> None:
        """Ends the helper."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        for port in self._ports:
            port.close()
