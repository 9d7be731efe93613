"""Cancellations that grpc.aio would swallow."""

from __future__ import annotations

import asyncio


def raise_if_cancelled() -> None:
    """Raises CancelledError if the running task has been asked to end; call it where a call of grpc.aio has failed.

    A call that fails in the very moment in which its task is cancelled raises its own error, and asyncio does not say
    it twice: a loop that goes on after errors would go on for ever, and whoever waits for its end with it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
