"""radixmesh-detokenizer: ids to text, as they come."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixmesh.daemons.detokenizer.config import DetokenizerSettings
from radixmesh.daemons.detokenizer.daemon import DetokenizerDaemon
from radixmesh.daemons.runtime.lifecycle import Runtime, run_daemon
from radixmesh.daemons.runtime.settings import load_settings


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_settings(DetokenizerSettings, argv, "radixmesh-detokenizer")

    async def build(runtime: Runtime) -> DetokenizerDaemon:
        return DetokenizerDaemon(runtime, settings)

    return run_daemon("detokenizer", settings, build)


if __name__ == "__main__":
    sys.exit(main())
