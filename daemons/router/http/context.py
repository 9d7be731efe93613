"""Context that every endpoint works with."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from radixmesh.daemons.router.http.answers.chat_plans import ChatPlans
from radixmesh.daemons.router.http.answers.tokens import TokenTables
from radixmesh.daemons.router.http.bodies.body import BodyReader
from radixmesh.daemons.router.http.translated.response_store import ResponseStore
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.telemetry.metrics import Metrics


async def _no_flush(address: str, timeout_s: float) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpContext:
    """flush_cache: empties the prefix cache of the scheduler at an address, within so many seconds; its pages.

    created: when this router came up, in seconds of the epoch: what is told as the age of models."""

    router: Router
    tables: TokenTables
    chats: ChatPlans
    body: BodyReader
    metrics: Metrics
    progress: Progress
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    flush_cache: Callable[[str, float], Awaitable[int]] = _no_flush
    created: int = field(default_factory=lambda: int(time.time()))


def new_id(prefix: str, given: str | None) -> str:
    """The request's id: the client's own, or a new one."""
    return given or f"{prefix}-{uuid.uuid4().hex}"
