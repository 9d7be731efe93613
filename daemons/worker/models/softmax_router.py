"""Routing by the experts of highest scores (Shazeer et al. 2017; Fedus et al. 2021).

Legend: T rows, D hidden size, E experts, A experts a row picks.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.experts import Routing
from radixmesh.daemons.worker.models.row_maths import linear


def route_by_softmax(x_TD: torch.Tensor, *, w_router_DE: torch.Tensor, num_picks: int, is_normalised: bool) -> Routing:
    """The `num_picks` experts of highest probability, weighted by it; float32 from the softmax on.

    is_normalised: the weights of a row are divided by their sum, which is a softmax over the picked ones alone.
    """
    weights_TA, expert_ids_TA = (x_TD @ w_router_DE).float().softmax(dim=-1).topk(num_picks, dim=-1)
    if is_normalised:
        weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
    return Routing(expert_ids_TA=expert_ids_TA, weights_TA=weights_TA)


def route_by_picked_softmax(
    x_TD: torch.Tensor, *, w_router_DE: torch.Tensor, b_router_E: torch.Tensor | None, num_picks: int
) -> Routing:
    """The `num_picks` experts of highest score, weighted by a softmax over their scores."""
    scores_TA, expert_ids_TA = linear(x_TD, w_router_DE, b_router_E).float().topk(num_picks, dim=-1)
    return Routing(expert_ids_TA=expert_ids_TA, weights_TA=scores_TA.softmax(dim=-1))


def route_by_sigmoid(x_TD: torch.Tensor, *, w_router_DE: torch.Tensor, num_picks: int) -> Routing:
    """The `num_picks` experts of highest score, each weighted by the sigmoid of its own."""
    scores_TA, expert_ids_TA = (x_TD @ w_router_DE).topk(num_picks, dim=-1)
    return Routing(expert_ids_TA=expert_ids_TA, weights_TA=scores_TA.float().sigmoid())
