"""radixmesh-router: the daemon that clients speak to."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.runtime.lifecycle import Runtime, run_daemon
from radixmesh.daemons.runtime.rpc.gates.unary_gate import UnaryLimits
from radixmesh.daemons.runtime.settings import load_settings


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_settings(RouterSettings, argv, "radixmesh-router")

    async def build(runtime: Runtime) -> RouterDaemon:
        return RouterDaemon(runtime, settings)

    limits = UnaryLimits(
        max_message_bytes=settings.grpc_message_bytes,
        max_bytes=4 * settings.grpc_message_bytes,
        patience_s=settings.grpc_message_s,
        num_receiving=max(3, settings.grpc_receiving_bytes // settings.grpc_message_bytes),
        num_sending=2,
        # Strangers' calls that send nothing hold a connection for so long.
        quick_s=0.25,
    )
    return run_daemon("router", settings, build, limits)


if __name__ == "__main__":
    sys.exit(main())
