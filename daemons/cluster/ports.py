"""Chooses the ports of a cluster on this machine before anything is started."""

import errno
import random
import socket
import sys
from collections.abc import Mapping

from radixmesh.daemons.cluster.endpoint import LOCAL_HOST, Endpoint
from radixmesh.daemons.cluster.errors import ClusterError, PortTakenError

# Below Linux's ephemeral range (32768 and up): an outgoing connection of some other process can then never sit on a
# port that a dead daemon is about to be restarted on.
_FIRST_PORT, _LAST_PORT = 20000, 32000


class PortClaims:
    """Ports of one cluster, which no other cluster of this machine is given while it runs: a daemon that was killed
    finds its port free when it starts again, also while others choose theirs.

    A claim is an abstract socket of Linux, which ends with the process; elsewhere there is none. Not thread-safe.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def assign(self, endpoints: Mapping[Endpoint, int | None]) -> dict[Endpoint, int]:
        """Gives every endpoint a port that is free now: its published one, or any.

        Raises PortTakenError for a published port in use. All probing sockets stay open until the last port is chosen,
        so no port is given out twice.
        """
        assigned: dict[Endpoint, int] = {}
        held: list[socket.socket] = []
        try:
            for endpoint, port in sorted(endpoints.items(), key=lambda item: item[1] is None):
                holder, assigned[endpoint] = (
                    self._hold_any() if port is None else (self._hold_published(endpoint, port), port)
                )
                held.append(holder)
        finally:
            for holder in held:
                holder.close()
        return assigned

    def release(self) -> None:
        for claim in self._claims:
            claim.close()
        self._claims.clear()

    def _hold_published(self, endpoint: Endpoint, port: int) -> socket.socket:
        try:
            return self._hold(port)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise PortTakenError(f"{endpoint.service} may not use port {port}: publish one above 1023") from error
            raise PortTakenError(
                f"port {port}, published by {endpoint.service}, is in use; stop what listens there (another mesh?)"
            ) from error

    def _hold_any(self) -> tuple[socket.socket, int]:
        for _ in range(1000):
            port = random.randint(_FIRST_PORT, _LAST_PORT)
            try:
                return self._hold(port), port
            except OSError:
                continue
        raise ClusterError(
            f"no free port found between {_FIRST_PORT} and {_LAST_PORT}; stop some listeners and try again"
        )

    def _hold(self, port: int) -> socket.socket:
        """Raises OSError where somebody listens, or another cluster has it."""
        holder = _listener(port)
        try:
            self._claim(port)
        except OSError:
            holder.close()
            raise
        return holder

    def _claim(self, port: int) -> None:
        if sys.platform != "linux":
            return
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0radixmesh-port-{port}")
        except OSError:
            claim.close()
            raise
        self._claims.append(claim)


def _listener(port: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Past connections in TIME_WAIT do not matter; a listener still makes the bind fail.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOCAL_HOST, port))
        # Two holders that both allow reuse may bind one port; only one of them may listen.
        holder.listen(1)
    except OSError:
        holder.close()
        raise
    return holder
