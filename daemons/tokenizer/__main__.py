"""radixmesh-tokenizer: text and chats to ids."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixmesh.daemons.runtime.lifecycle import Runtime, run_daemon
from radixmesh.daemons.runtime.rpc.gates.stream_gate import StreamLimits
from radixmesh.daemons.runtime.rpc.gates.unary_gate import UnaryLimits
from radixmesh.daemons.runtime.rpc.wire_bounds import MAX_TEXT_BYTES
from radixmesh.daemons.runtime.settings import load_settings
from radixmesh.daemons.tokenizer.config import TokenizerSettings
from radixmesh.daemons.tokenizer.daemon import TokenizerDaemon

# The largest that a router sends: all the texts of one call, and what is around them.
MAX_MESSAGE_BYTES = MAX_TEXT_BYTES + (1 << 20)


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_settings(TokenizerSettings, argv, "radixmesh-tokenizer")

    async def build(runtime: Runtime) -> TokenizerDaemon:
        return TokenizerDaemon(runtime, settings)

    limits = UnaryLimits(max_message_bytes=MAX_MESSAGE_BYTES, max_bytes=settings.max_queued_bytes)
    # A router opens one, and another one when it has lost that.
    stream_limits = StreamLimits(max_message_bytes=MAX_MESSAGE_BYTES, max_streams=2)
    return run_daemon("tokenizer", settings, build, limits, stream_limits)


if __name__ == "__main__":
    sys.exit(main())
