"""radixmesh-front: one address for several routers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixmesh.daemons.front.config import FrontSettings
from radixmesh.daemons.front.daemon import FrontDaemon
from radixmesh.daemons.runtime.lifecycle import Runtime, run_daemon
from radixmesh.daemons.runtime.settings import load_settings


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_settings(FrontSettings, argv, "radixmesh-front")

    async def build(runtime: Runtime) -> FrontDaemon:
        return FrontDaemon(runtime, settings)

    return run_daemon("front", settings, build)


if __name__ == "__main__":
    sys.exit(main())
