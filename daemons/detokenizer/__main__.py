"""radixmesh-detokenizer: ids to text, as they come."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixmesh.daemons.detokenizer.config import DetokenizerSettings
from radixmesh.daemons.detokenizer.daemon import DetokenizerDaemon
from radixmesh.daemons.runtime.lifecycle import Runtime, run_daemon
from radixmesh.daemons.runtime.rpc.frames import MAX_OPEN_FRAME_BYTES
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamLimits
from radixmesh.daemons.runtime.settings import load_settings


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_settings(DetokenizerSettings, argv, "radixmesh-detokenizer")

    async def build(runtime: Runtime) -> DetokenizerDaemon:
        return DetokenizerDaemon(runtime, settings)

    limits = StreamLimits(max_message_bytes=MAX_OPEN_FRAME_BYTES)
    return run_daemon("detokenizer", settings, build, stream_limits=limits)


if __name__ == "__main__":
    sys.exit(main())
