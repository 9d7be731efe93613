"""The attention backends by name."""

from __future__ import annotations

from collections.abc import Callable

from radixmesh.daemons.worker.registry import Registry

from .backend import AttentionBackend, AttentionPlacement, AttentionShape

AttentionCreator = Callable[[AttentionShape, AttentionPlacement], AttentionBackend]


def attention_backends() -> Registry[AttentionCreator]:
    """Creators of all backends; asking for one imports it."""
    return Registry("attention backend", {"paged_torch": _paged_torch, "naive": _naive})


def _paged_torch() -> AttentionCreator:
    from .paged_torch import PagedTorchAttention

    return PagedTorchAttention


def _naive() -> AttentionCreator:
    from .naive import NaiveAttention

    return NaiveAttention
