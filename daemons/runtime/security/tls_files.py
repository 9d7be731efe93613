"""The files that TLS works with: who this process is, and whom it believes. No grpc, for every server."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

_PREFIX = "RADIXMESH_TLS_"
# A daemon that serves a unix socket has no name of its own.
_UNIX_PEER_NAME = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files; all None = plain connections.

    cert_file, key_file: this process, as a server, and as a client of servers that ask who it is. client_ca_file: who
    signs the clients that are let in; None = clients need no certificate. ca_file: who signs the servers that are
    believed; None = connections to others are plain. peer_name: the name in the certificates of servers; None = the
    host of their address.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None
    ca_file: Path | None = None
    peer_name: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> TlsFiles:
        """The files that RADIXMESH_TLS_CERT_FILE and its siblings name, as the settings of a daemon do."""

        def path(name: str) -> Path | None:
            text = environ.get(_PREFIX + name, "").strip()
            return Path(text) if text.lower() not in ("", "none") else None

        name = environ.get(_PREFIX + "PEER_NAME", "").strip()
        return cls(
            cert_file=path("CERT_FILE"),
            key_file=path("KEY_FILE"),
            client_ca_file=path("CLIENT_CA_FILE"),
            ca_file=path("CA_FILE"),
            peer_name=name if name.lower() not in ("", "none") else None,
        )

    @property
    def has_server(self) -> bool:
        """True if incoming connections are encrypted."""
        return self.cert_file is not None

    @property
    def has_client(self) -> bool:
        """True if outgoing connections are encrypted."""
        return self.ca_file is not None

    def fault(self) -> str:
        """Explains a wrong choice of files to whoever made it; empty = nothing is wrong."""
        if (self.cert_file is None) != (self.key_file is None):
            return "--tls-cert-file and --tls-key-file go together: name both or neither"
        if self.client_ca_file is not None and self.cert_file is None:
            return "--tls-client-ca-file needs --tls-cert-file and --tls-key-file: clients are asked under TLS only"
        return ""

    def verified_name(self, *, is_unix: bool) -> str | None:
        """The name that a server's certificate must have; None = the host that was dialled."""
        return self.peer_name or (_UNIX_PEER_NAME if is_unix else None)

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does; a file that is missing counts as one that never changed."""
        return tuple(_changed_ns(path) for path in self._paths())

    def server_context(self) -> ssl.SSLContext:
        """For HTTP. Raises MeshError naming the file that cannot be used."""
        assert self.cert_file is not None and self.key_file is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_chain(context, self.cert_file, self.key_file)
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _load_authorities(context, self.client_ca_file)
            # A session that is resumed shows no certificate: it would outlive the certificate, and its authority here.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context

    def client_context(self) -> ssl.SSLContext:
        """For HTTP clients. Raises MeshError naming the file that cannot be used."""
        assert self.ca_file is not None
        # Not ssl.create_default_context(), which also believes the authorities of the system.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, self.ca_file)
        if self.cert_file is not None and self.key_file is not None:
            _load_chain(context, self.cert_file, self.key_file)
        return context

    def check(self) -> None:
        """Raises MeshError INVALID_ARGUMENT naming a file that cannot be used."""
        if self.has_server:
            self.server_context()
        if self.has_client:
            self.client_context()

    def _paths(self) -> tuple[Path, ...]:
        paths = (self.cert_file, self.key_file, self.client_ca_file, self.ca_file)
        return tuple(path for path in paths if path is not None)


def _load_chain(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    """Also finds out whether the two belong together."""
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ValueError) as error:
        raise _unusable(f"{cert_file} and {key_file}", "certificate chain and its key", error) from error


def _load_authorities(context: ssl.SSLContext, ca_file: Path) -> None:
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:
        raise _unusable(str(ca_file), "certificates of authorities", error) from error


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal and wait for ever.
    raise ValueError("the key has a password: write it out without one")


def _unusable(paths: str, what: str, error: Exception) -> MeshError:
    message = f"{paths} cannot be used as {what} ({error}): PEM is expected"
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "tls"})


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
