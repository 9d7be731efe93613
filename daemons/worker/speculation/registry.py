"""Drafters by name of the algorithm."""

from __future__ import annotations

from radixmesh.daemons.worker.registry import Registry
from radixmesh.daemons.worker.speculation.drafter import Drafter
from radixmesh.daemons.worker.speculation.settings import SpeculativeAlgorithm


def drafters() -> Registry[Drafter]:
    """Those that settings can name."""

    def ngram() -> Drafter:
        from radixmesh.daemons.worker.speculation.ngram import NgramDrafter

        return NgramDrafter()

    return Registry("speculative algorithm", {SpeculativeAlgorithm.NGRAM: ngram})
