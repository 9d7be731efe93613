"""Rewrites a service's settings from the world inside containers to the one of this machine."""

import re
from collections.abc import Mapping
from pathlib import Path

from radixmesh.daemons.cluster.endpoint import BINDING, LOCAL_HOST, Endpoint
from radixmesh.daemons.cluster.errors import ComposeError

_OWN_LOOPBACK = re.compile(r"(?<![\w.:-])(?:127\.0\.0\.1|localhost):(?P<port>\d{1,5})(?!\d)")
_LIST_SEPARATORS = frozenset(",; =")


class Translation:
    """The rewriting for one replica of one service. Its table of ports and paths never changes."""

    def __init__(
        self,
        *,
        service: str,
        replica: int,
        ports: Mapping[Endpoint, int],
        replicas: Mapping[str, int],
        paths: Mapping[str, Path],
    ) -> None:
        self._service = service
        self._replica = replica
        self._ports = ports
        self._replicas = replicas
        self._paths = paths
        self._known_ports = {(endpoint.service, endpoint.container_port) for endpoint in ports}
        names = "|".join(re.escape(name) for name in sorted(replicas, key=len, reverse=True))
        self._reference = re.compile(rf"(?<![\w.-])(?P<service>{names}):(?P<port>\d{{1,5}})(?!\d)")
        # Longer paths first, so that a volume mounted inside another one wins.
        roots = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
        self._path = re.compile(rf"(?<![\w./-])(?P<root>{roots})(?=$|[/,;:\s])") if paths else None

    def text(self, text: str, where: str) -> str:
        """Translates one environment value or argument.

        `0.0.0.0:port` and the service's own loopback become its own address, `service:port` the comma-joined addresses
        of all replicas of that service, a path inside a volume the path on the host. Raises ComposeError, naming
        `where`, for a port that the named service does not have.
        """
        # The service's own loopback goes first: the later steps write 127.0.0.1 addresses that must not be read as it.
        text = _OWN_LOOPBACK.sub(self._own_or_unchanged, text)
        text = BINDING.sub(lambda match: self._own(int(match["port"])), text)
        text = self._reference.sub(lambda match: self._peers(match, where), text)
        return text if self._path is None else self._path.sub(lambda match: str(self._paths[match["root"]]), text)

    def _own(self, port: int) -> str:
        return f"{LOCAL_HOST}:{self._ports[Endpoint(self._service, self._replica, port)]}"

    def _own_or_unchanged(self, match: re.Match[str]) -> str:
        port = int(match["port"])
        return self._own(port) if (self._service, port) in self._known_ports else match[0]

    def _peers(self, match: re.Match[str], where: str) -> str:
        name, port, count = match["service"], int(match["port"]), self._replicas[match["service"]]
        if count == 0:
            raise ComposeError(where, f"it names {name}, which has no replica; scale {name} to at least 1")
        if (name, port) not in self._known_ports:
            known = ", ".join(str(number) for service, number in sorted(self._known_ports) if service == name)
            raise ComposeError(where, f"it names {match[0]}, but {name} listens on {known or 'no port'}")
        if count > 1 and not _is_list_element(match):
            raise ComposeError(
                where, f"{match[0]} stands for {count} replicas of {name} and cannot be part of a longer word"
            )
        return ",".join(f"{LOCAL_HOST}:{self._ports[Endpoint(name, index, port)]}" for index in range(1, count + 1))


def _is_list_element(match: re.Match[str]) -> bool:
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return (not before or before in _LIST_SEPARATORS) and (not after or after in _LIST_SEPARATORS)
