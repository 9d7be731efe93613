"""DeepSeek's routers: each picks experts by a function of one row of scores.

Source: DeepSeek-V2 (2024), sections 2.1 and 2.2; DeepSeek-V3 (2024), section 2.1.2.
Legend: T rows, D hidden size, E experts, G groups, M = E / G experts of a group, A picks.
"""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.models.deepseek.config import RouterConfig, TopkMethod
from radixmesh.daemons.worker.models.deepseek.weights import MoeWeights
from radixmesh.daemons.worker.models.experts import Routing


class DeepseekRouter:
    """A `Router`: from normed rows to experts and weights, in float32 whatever the dtype of the rows."""

    def __init__(self, config: RouterConfig, weights: MoeWeights) -> None:
        self._config = config
        self._weights = weights

    def __call__(self, x_TD: torch.Tensor) -> Routing:
        logits_TE = x_TD.float() @ self._weights.w_router_DE
        if self._config.method is TopkMethod.BIASED:
            assert self._weights.b_router_E is not None
            return pick_biased(_sigmoid(logits_TE), self._weights.b_router_E, self._config)
        return pick_highest(logits_TE.softmax(dim=-1), self._config)


def pick_highest(scores_TE: torch.Tensor, config: RouterConfig) -> Routing:
    """The highest scores, within the groups of the highest best ones; their scores are the weights."""
    best_TG = _by_group(scores_TE, config).amax(dim=-1)
    open_TE = scores_TE.masked_fill(_is_closed(best_TG, scores_TE, config), 0.0)
    weights_TA, expert_ids_TA = open_TE.topk(config.num_picks, dim=-1)
    return Routing(expert_ids_TA, _scaled(weights_TA, config))


def pick_biased(scores_TE: torch.Tensor, bias_E: torch.Tensor, config: RouterConfig) -> Routing:
    """The highest of score + bias, within the groups whose two highest sum to most; scores without bias are weights."""
    biased_TE = scores_TE + bias_E
    if config.num_groups > 1:
        best_TG2 = _by_group(biased_TE, config).topk(2, dim=-1).values
        best_TG = best_TG2[..., 0] + best_TG2[..., 1]
        biased_TE = biased_TE.masked_fill(_is_closed(best_TG, scores_TE, config), float("-inf"))
    expert_ids_TA = biased_TE.topk(config.num_picks, dim=-1).indices
    return Routing(expert_ids_TA, _scaled(scores_TE.gather(1, expert_ids_TA), config))


def _sigmoid(x_TE: torch.Tensor) -> torch.Tensor:
    # torch.sigmoid takes another path for the last elements of an array, which differs in the last bit now and then:
    # a row's weights would depend on its index. exp has one path only; sums and quotients are exact.
    return 1.0 / (1.0 + (-x_TE).exp())


def _by_group(x_TE: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    return x_TE.view(x_TE.shape[0], config.num_groups, -1)


def _is_closed(best_TG: torch.Tensor, scores_TE: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """bool [T, E]: expert of a group that is not picked."""
    picked_TP = best_TG.topk(config.num_picked_groups, dim=-1).indices
    closed_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, picked_TP, False)
    return closed_TG.repeat_interleave(scores_TE.shape[1] // config.num_groups, dim=1)


def _scaled(weights_TA: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    if config.is_normed:
        # Sigmoid scores may all be 0.
        weights_TA = weights_TA / (weights_TA.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TA * config.weight_scale
