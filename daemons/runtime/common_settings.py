"""The settings that every daemon has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.settings import setting


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class PredecessorEnd(StrEnum):
    """End of the process that ran in this one's place before it, told by the supervisor of both."""

    UNKNOWN = "unknown"
    BY_ITSELF = "by-itself"
    """A crash, an error, or a hang for which it was killed."""
    FROM_OUTSIDE = "from-outside"
    """It was asked to leave, or killed by somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """Settings that all daemons have: addresses, logs, drain. A daemon derives its own settings from them."""

    listen: tuple[str, ...] = setting(
        ("127.0.0.1:0",), "addresses to serve gRPC on: host:port (0: any free) or unix:/path"
    )
    address_file: Path | None = setting(None, "file that gets the bound addresses, one a line, once they accept calls")
    metrics_listen: str | None = setting(None, "host:port that serves Prometheus metrics over HTTP")
    otlp_endpoint: str | None = setting(
        None, "http://host:4317 of an OpenTelemetry collector (OTLP over gRPC) that gets a trace of every request"
    )
    log_level: LogLevel = setting(LogLevel.INFO, "least level that is logged")
    drain_s: float = setting(30.0, "seconds that running work gets to finish after SIGTERM")
    stall_s: float = setting(10.0, "seconds of pending work without progress after which health is NOT_SERVING")
    predecessor_end: PredecessorEnd = setting(
        PredecessorEnd.UNKNOWN,
        "how the process before this one ended, as its supervisor saw it; `up` sets it",
    )

    tls_cert_file: Path | None = setting(
        None, "PEM certificate chain of this daemon: serves under TLS, and shows it to servers that ask"
    )
    tls_key_file: Path | None = setting(None, "PEM private key of the certificate, without a password")
    tls_client_ca_file: Path | None = setting(
        None, "PEM authorities: only clients with a certificate of theirs come in"
    )
    tls_ca_file: Path | None = setting(None, "PEM authorities of the servers that this daemon dials: dials under TLS")
    tls_peer_name: str | None = setting(None, "name in the certificates of all servers, instead of their addresses'")

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS, for servers and channels."""
        return TlsFiles(
            cert_file=self.tls_cert_file,
            key_file=self.tls_key_file,
            client_ca_file=self.tls_client_ca_file,
            ca_file=self.tls_ca_file,
            peer_name=self.tls_peer_name,
        )

    def __post_init__(self) -> None:
        if fault := self.tls.fault():
            raise ValueError(fault)
        if not self.listen:
            raise ValueError("--listen (or RADIXMESH_LISTEN): name at least one address")
        if self.drain_s < 0:
            raise ValueError(f"--drain-s (or RADIXMESH_DRAIN_S) must be >= 0, not {self.drain_s}")
        if self.stall_s <= 0:
            raise ValueError(f"--stall-s (or RADIXMESH_STALL_S) must be > 0, not {self.stall_s}")
