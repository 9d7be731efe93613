"""Caller of the current task, as far as an API key tells."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """tenant: named beside the key, empty = none is; None = the request itself says whose it is: no key was asked for,
    or the key may name any tenant (may_name_tenant). min_priority, max_priority: what its requests may ask for.
    """

    tenant: str | None = None
    may_name_tenant: bool = False
    min_priority: int = 0
    max_priority: int = 0


ANYBODY = Caller(min_priority=-(2**31), max_priority=2**31 - 1)
"""The caller where no key is asked for: any tenant may be claimed."""
# A context variable is per task, not global state: each handler sees its own.
_caller: ContextVar[Caller] = ContextVar("radixmesh_caller", default=ANYBODY)


def set_caller(caller: Caller) -> None:
    """Binds the caller for the rest of the current task."""
    _caller.set(caller)


def current_caller() -> Caller:
    """The bound caller; one that may be anybody's where no key was asked for."""
    return _caller.get()
