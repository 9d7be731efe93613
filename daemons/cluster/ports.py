"""Chooses the ports of a cluster on this machine before anything is started."""

import errno
import random
import socket
from collections.abc import Mapping

from radixmesh.daemons.cluster.endpoint import LOCAL_HOST, Endpoint
from radixmesh.daemons.cluster.errors import ClusterError, PortTakenError

# Below Linux's ephemeral range (32768 and up): an outgoing connection of some other process can then never sit on a
# port that a dead daemon is about to be restarted on.
_FIRST_PORT, _LAST_PORT = 20000, 32000


def assign_ports(endpoints: Mapping[Endpoint, int | None]) -> dict[Endpoint, int]:
    """Gives every endpoint a port that is free now: its published one, or any.

    Raises PortTakenError for a published port in use. All probing sockets stay open until the last port is chosen, so
    no port is given out twice.
    """
    assigned: dict[Endpoint, int] = {}
    held: list[socket.socket] = []
    try:
        for endpoint, port in sorted(endpoints.items(), key=lambda item: item[1] is None):
            holder, assigned[endpoint] = _hold_any() if port is None else (_hold_published(endpoint, port), port)
            held.append(holder)
    finally:
        for holder in held:
            holder.close()
    return assigned


def _hold_published(endpoint: Endpoint, port: int) -> socket.socket:
    try:
        return _hold(port)
    except OSError as error:
        if error.errno == errno.EACCES:
            raise PortTakenError(f"{endpoint.service} may not use port {port}: publish one above 1023") from error
        raise PortTakenError(
            f"port {port}, published by {endpoint.service}, is in use; stop what listens there (another mesh?)"
        ) from error


def _hold_any() -> tuple[socket.socket, int]:
    for _ in range(1000):
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        try:
            return _hold(port), port
        except OSError:
            continue
    raise ClusterError(f"no free port found between {_FIRST_PORT} and {_LAST_PORT}; stop some listeners and try again")


def _hold(port: int) -> socket.socket:
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
