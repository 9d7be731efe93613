"""Settings of the front."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings(CommonSettings):
    """One address for several routers: connections are handed to whichever serves and has the fewest."""

    grpc_front: str | None = setting(None, "host:port where clients' gRPC connections come in")
    grpc_routers: tuple[str, ...] = setting((), "gRPC addresses of routers; a name stands for all of its replicas")
    http_front: str | None = setting(None, "host:port where clients' HTTP connections come in")
    http_routers: tuple[str, ...] = setting((), "HTTP addresses of routers, comma-separated")
    connect_wait_s: float = setting(10.0, "seconds that a connection waits for a router that serves")
    connections: int = setting(
        16_384,
        "connections of clients at once, at both listeners together; further ones are closed at once; at most what the "
        "limit of open files allows, which is raised as far as it may be",
    )
    probe_s: float = setting(1.0, "seconds between two questions to a router whether it serves")

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        if not self.grpc_front and not self.http_front:
            raise ValueError("--grpc-front or --http-front (RADIXMESH_GRPC_FRONT, RADIXMESH_HTTP_FRONT) is needed")
        for listener, routers, name in (
            (self.grpc_front, self.grpc_routers, "grpc"),
            (self.http_front, self.http_routers, "http"),
        ):
            if listener and not routers:
                raise ValueError(f"--{name}-front needs --{name}-routers: nobody would take its connections")
        for name in ("connect_wait_s", "probe_s", "connections"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be > 0, not {getattr(self, name)}")
