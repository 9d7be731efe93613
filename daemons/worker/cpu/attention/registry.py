"""The attention backends by name."""

from __future__ import annotations

from collections.abc import Callable

from radixmesh.daemons.worker.cpu.attention.backend import AttentionBackend, AttentionPlacement, AttentionShape
from radixmesh.daemons.worker.registry import Registry

AttentionCreator = Callable[[AttentionShape, AttentionPlacement], AttentionBackend]


def attention_backends() -> Registry[AttentionCreator]:
    """Creators of all backends; asking for one imports it."""
    return Registry("attention backend", {"paged_torch": _paged_torch, "naive": _naive})


def _paged_torch() -> AttentionCreator:
    from radixmesh.daemons.worker.cpu.attention.paged_torch import PagedTorchAttention

    return PagedTorchAttention


def _naive() -> AttentionCreator:
    from radixmesh.daemons.worker.cpu.attention.naive import NaiveAttention

    return NaiveAttention
