"""The guides of the slots that follow a grammar."""

from __future__ import annotations

from collections.abc import Sequence

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.source import invalid_grammar
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.runner import SampleInput


def guide_of(admit: Admit, blob: bytes, store: GrammarStore, vocab_size: int) -> Guide:
    """At the end of the admit's output. Raises INVALID_GRAMMAR for a blob or an output that cannot be followed."""
    guide = Guide(store.get(admit.grammar_hash, blob).matcher(), vocab_size, store.tokens)
    guide.replay(admit.output_ids)
    return guide


def jump_forward(sample: SampleInput, most: int) -> Sequence[int]:
    """A drafter (`drafts.py`): tokens of the text that an output's grammar forces, nothing for any other output."""
    return () if sample.guide is None else sample.guide.forced_ids(most)


def stuck() -> MeshError:
    """The error of an output that no token may follow, and that may not end either."""
    return invalid_grammar("the grammar allows no token here, not even the end: it can never be satisfied", "")
