"""Trees that a network on a device grows within captured steps, from its output for the last tokens of rows.

    level 1     ids that may follow the last tokens               no row of the network
    level n     ids that may follow the frontier of level n - 1   `topk` rows of each tree, whose KV goes to scratch

The network's rows attend to what it has of the row, and then to their own path: tails of decodes.

Legend: B rows of a step, R = B x topk rows of a level.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixmesh.daemons.worker.cuda.drafting.network import DraftNetwork
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler
from radixmesh.daemons.worker.speculation.draft_tree import TreeShape
from radixmesh.kernels.sampling.drafts import DraftInputs
from radixmesh.kernels.sampling.grow_trees import BranchRows, Candidates, RankScratch, branch_out, choose_drafts
from radixmesh.kernels.sampling.network_rows import ChainRows, NetworkShape

Forward = Callable[[BranchRows, torch.Tensor | None], torch.Tensor]
"""The network's output for rows with these features."""


class NetworkTrees:
    """Buffers of steps of up to max_rows trees. scratch_first: the pool's first token of those for branches."""

    def __init__(
        self,
        tree: TreeShape,
        network: DraftNetwork,
        shape: NetworkShape,
        sampler: SlotSampler,
        *,
        max_rows: int,
        scratch_first: int,
        dummy_slot: int,
        has_features: bool,
        device: torch.device,
    ) -> None:
        self._tree, self._network, self._shape, self._sampler = tree, network, shape, sampler
        self._scratch_first, self._dummy_slot, self._has_features = scratch_first, dummy_slot, has_features
        size = max_rows * tree.topk
        self._found = Candidates.allocate(max_rows, tree.topk, tree.num_steps, device)
        # A level's paths are those of the level before and a token more.
        self._rows = tuple(BranchRows.allocate(size, tree.num_steps, device) for _ in range(2))
        self._rank = RankScratch(size, sampler.vocab_size, tree.topk, device)

    def grow(self, output: torch.Tensor, inputs: DraftInputs, chain: ChainRows, forward: Forward) -> None:
        """Drafts of the rows, into the window of the inputs and its parents. output: the network's of the rows' last
        tokens. chain: number of drafts, slots and positions of the first ones."""
        found = self._found.of(len(chain.num_drafts))
        slots, positions = chain.sample_slots, chain.sample_positions
        for level in range(1, self._tree.num_steps + 1):
            logits = self._network.logits(output)
            self._sampler.rank_drafts(logits, slots, positions, self._rank, level, found)
            if level == self._tree.num_steps:
                break
            rows, before = (self._rows[(level + n) % 2].of(len(found.ids_BN) * self._tree.topk) for n in range(2))
            branch_out(
                found, level, inputs, chain.num_drafts, self._shape, self._scratch_first, self._dummy_slot, rows, before
            )
            output = forward(rows, output.index_select(0, rows.before) if self._has_features else None)
            slots, positions = rows.sample_slots, rows.sample_positions
        choose_drafts(found, inputs, chain.num_drafts)


def scratch_tokens(tree: TreeShape | None, max_rows: int) -> int:
    """Tokens of a network's pool for the branches of a step."""
    return 0 if tree is None else max_rows * tree.tokens_per_row
