"""Turns at the tokenizers: the bytes that one router has there at once are bounded, and tenants share them evenly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

# Texts of this size are not worth a wait.
SMALL_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class _Tenant:
    """num_bytes: of its calls at the tokenizers now. waiting: bytes of each call that waits, and what wakes it."""

    num_bytes: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class TokenizerTurns:
    """max_bytes: of all large calls that are on their way; one alone may have more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tenants: dict[str, _Tenant] = {}

    @asynccontextmanager
    async def turn(self, tenant: str, num_bytes: int) -> AsyncIterator[None]:
        """Within it a call of that many bytes is on its way. Small ones do not wait; a tenant's go in their order."""
        if num_bytes <= SMALL_BYTES:
            yield
            return
        ours = self._tenants.setdefault(tenant, _Tenant())
        woken = asyncio.get_running_loop().create_future()
        ours.waiting.append((num_bytes, woken))
        self._wake()
        try:
            await woken
            yield
        finally:
            if woken.cancelled():
                if (num_bytes, woken) in ours.waiting:
                    ours.waiting.remove((num_bytes, woken))
            else:
                self._num_bytes -= num_bytes
                ours.num_bytes -= num_bytes
            if not ours.waiting and not ours.num_bytes:
                self._tenants.pop(tenant, None)
            self._wake()

    def _wake(self) -> None:
        while True:
            waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
            if not waiting:
                return
            tenant = min(waiting, key=lambda tenant: tenant.num_bytes)
            num_bytes, woken = tenant.waiting[0]
            if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                return
            tenant.waiting.popleft()
            if woken.cancelled():
                continue
            self._num_bytes += num_bytes
            tenant.num_bytes += num_bytes
            woken.set_result(None)
