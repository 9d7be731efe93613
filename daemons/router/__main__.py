"""radixmesh-router: the mesh's front door."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.runtime.lifecycle import Runtime, run_daemon
from radixmesh.daemons.runtime.settings import load_settings


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_settings(RouterSettings, argv, "radixmesh-router")

    async def build(runtime: Runtime) -> RouterDaemon:
        return RouterDaemon(runtime, settings)

    return run_daemon("router", settings, build)


if __name__ == "__main__":
    sys.exit(main())
