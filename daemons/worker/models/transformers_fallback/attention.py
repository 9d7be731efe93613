"""The attention function that modules of transformers call: it hands rows to whoever writes them to a pool and attends.

Legend: T rows, H heads, K kv heads, d head_dim of keys, v of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape

# Names of attention functions. That of the running one has no mask function, so that no mask is made.
PAGED, RECORDING = "radixmesh_paged", "radixmesh_recording"
_STEP = "radixmesh_step"
# Arguments beside those that `_record` takes, on which no score depends: windows are read off the mask.
_WITHOUT_EFFECT = frozenset({"dropout", "sliding_window", "position_ids", "cache_position"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One call of the attention function, as the modules make it. value_dim is at most head_dim."""

    shape: AttentionShape
    value_dim: int
    window: int | None
    has_sinks: bool = False


class Rows(NamedTuple):
    """A layer's queries [T, H, d] (contiguous), keys and values [T, K, d], values with zeros behind the first v, and
    sinks [H] or None."""

    q_THd: torch.Tensor
    k_TKd: torch.Tensor
    v_TKd: torch.Tensor
    sinks_H: torch.Tensor | None


Attend = Callable[[int, AttentionLayer, Rows], torch.Tensor]
"""Writes the keys and values of a layer's rows, by its index, and attends: [T, H, d]."""


@dataclass(slots=True)
class AttentionStep:
    """The state that all attention modules of a model share: the running step's attention, and each layer by its
    index."""

    attend: Attend | None = None
    layers: dict[int, AttentionLayer] = field(default_factory=dict)


class UnusableAttentionError(Exception):
    """The modules attend in a way that the pool or our attention has no place for; the text says which."""


def install(model: nn.Module, step: AttentionStep) -> None:
    """Gives all modules of `model` the step by which the attention function finds the running one's attention."""
    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(RECORDING, _record)
    AttentionMaskInterface.register(RECORDING, _describe_mask)
    for module in model.modules():
        module.__dict__[_STEP] = step


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, d], key [1, K, T, d], value [1, K, T, v] -> [1, T, H, v]."""
    step, index = _step(module), _index(module)
    attend, layer = step.attend, step.layers[index]
    assert attend is not None and attention_mask is None
    q_THd, k_TKd, v_TKv = (x[0].transpose(0, 1) for x in (query, key, value))
    v_TKd = functional.pad(v_TKv, (0, layer.shape.head_dim - layer.value_dim))
    o_THd = attend(index, layer, Rows(q_THd.contiguous(), k_TKd, v_TKd, s_aux))
    return o_THd[None, :, :, : layer.value_dim], None


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Notes the shape of a layer's attention, and returns zeros, which nobody reads."""
    step, index = _step(module), _index(module)
    if index in step.layers:
        raise UnusableAttentionError(f"layer {index} attends more than once")
    if key.shape[2] != query.shape[2]:
        raise UnusableAttentionError("keys are of other tokens than queries (cross-attention)")
    if value.shape[-1] > query.shape[-1]:
        raise UnusableAttentionError("values are wider than keys")
    # Biases, or the keys that an index picks: the check at the end of loading is too short to show those.
    unknown = [name for name, argument in others.items() if name not in _WITHOUT_EFFECT and _is_numeric(argument)]
    if unknown:
        raise UnusableAttentionError(
            f"layer {index} attends by {', '.join(unknown)}, which our attention does not have"
        )
    if attention_mask is None or attention_mask.shape != (1,):
        raise UnusableAttentionError("the attention mask is not the one of transformers' causal or window masks")
    step.layers[index] = AttentionLayer(
        shape=AttentionShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap=softcap,
        ),
        value_dim=value.shape[-1],
        window=int(attention_mask) or None,
        has_sinks=s_aux is not None,
    )
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _is_numeric(argument: object) -> bool:
    return isinstance(argument, torch.Tensor | int | float) and not isinstance(argument, bool)


def _step(module: nn.Module) -> AttentionStep:
    step: AttentionStep = module.__dict__[_STEP]
    return step


def _index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnusableAttentionError(f"{type(module).__name__} does not say which layer it is")
    return index


def _describe_mask(
    *, mask_function: Callable[..., torch.Tensor | bool], local_size: int | None = None, **_: object
) -> torch.Tensor:
    """int64 [1] in place of a mask: the window of the layers that get it, 0 where they see all before them."""
    far = 4 * (local_size or 1000) + 1
    first = 0 if local_size is None else far - local_size + 1

    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    is_causal = sees(far, far) and not sees(far, far + 1) and sees(far, first) and sees(far, (first + far) // 2)
    if not is_causal or (local_size is not None and sees(far, first - 1)):
        raise UnusableAttentionError("the attention mask is neither causal nor a sliding window (chunked?)")
    return torch.tensor([local_size or 0])
