"""The seam of drafters, which propose tokens that a step verifies beside the last token of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixmesh.daemons.worker.runner import SampleInput

Drafter = Callable[[SampleInput, int], Sequence[int]]
"""Proposes at most so many tokens that may follow the prompt and output of an input."""
