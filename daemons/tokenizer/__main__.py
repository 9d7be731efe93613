"""radixmesh-tokenizer: text and chats to ids."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixmesh.daemons.runtime.lifecycle import Runtime, run_daemon
from radixmesh.daemons.runtime.settings import load_settings
from radixmesh.daemons.tokenizer.config import TokenizerSettings
from radixmesh.daemons.tokenizer.daemon import TokenizerDaemon


def main(argv: Sequence[str] | None = None) -> int:
    settings = load_settings(TokenizerSettings, argv, "radixmesh-tokenizer")

    async def build(runtime: Runtime) -> TokenizerDaemon:
        return TokenizerDaemon(runtime, settings)

    return run_daemon("tokenizer", settings, build)


if __name__ == "__main__":
    sys.exit(main())
