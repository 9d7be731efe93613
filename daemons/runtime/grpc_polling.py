"""The threads by which gRPC waits for sockets in a daemon. Imports no grpc: it reads its environment when imported."""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"
# gRPC's event engine, its default, has threads of its own read sockets, and wakes two or three more of them before the
# one that waits for messages. Without it that one reads sockets itself.
_WITHOUT_ENGINE = "-event_engine_client,-event_engine_listener"


def poll_without_engine() -> None:
    """Has gRPC read sockets by the thread that waits for their messages. To be called before grpc is imported: later it
    changes nothing. An environment that sets GRPC_EXPERIMENTS itself is left as it is."""
    os.environ.setdefault(_VARIABLE, _WITHOUT_ENGINE)
