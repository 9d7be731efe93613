"""Reasons for which outputs end."""

from __future__ import annotations

from enum import IntEnum


class FinishReason(IntEnum):
    """Values as in `radixmesh.common.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    HANDED_OVER = 5
    """Of a prefill: the output goes on where its KV went. Clients never see it."""

    @property
    def label(self) -> str:
        """In metrics and traces."""
        return self.name.lower()
