"""The seam between a runner and the maths of a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.loader import TensorTargets
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape, BatchAttention
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch, LocalDispatch
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlanes
from radixmesh.daemons.worker.models.sharding import Share
from radixmesh.daemons.worker.ranks.group import Group
from radixmesh.daemons.worker.tiles import RowFunction, RowTiles

if TYPE_CHECKING:
    from radixmesh.daemons.worker.models.expert_checkpoint import ExpertSource
    from radixmesh.daemons.worker.models.experts import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of a model: device, dtype of weights and KV, and the ranks that share it, or its experts.

    is_out_first: projections lie in memory as [out, in], whichever way round the model sees them. has_projections:
    False leaves those of the layers, and experts, without memory (meta tensors), for who holds them in another form.
    max_total_len: longest sequence that is served, where it may be shorter than what the model allows.
    """

    device: torch.device
    dtype: torch.dtype
    group: Group
    is_out_first: bool = False
    has_projections: bool = True
    max_total_len: int | None = None
    experts: ExpertDispatch = field(default_factory=LocalDispatch)

    def of_projections(self) -> Placement:
        """The same for projections of layers, which may have no memory."""
        return self if self.has_projections else replace(self, device=torch.device("meta"))


class HiddenStates:
    """Outputs of some layers of a forward, [T, hidden] each, by layer from 0."""

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = frozenset(layers)
        self.by_layer: dict[int, torch.Tensor] = {}

    def wants(self, layer: int) -> bool:
        """True if somebody wants a layer's output."""
        return layer in self._layers

    def note(self, layer: int, x_TD: torch.Tensor) -> None:
        """Keeps a layer's output if it is wanted. Nobody changes that tensor afterwards."""
        if layer in self._layers:
            self.by_layer[layer] = x_TD


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBatch:
    """The rows of a step. T counts padding rows, which come last; the first `num_rows` are tokens.

    ids_T, positions_T int64. kv_slots_N int64 [num_rows]: where each token's KV is to be written in the pool.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    num_rows: int
    kv_slots_N: torch.Tensor
    kv: KvPlanes
    attention: BatchAttention
    tiles: RowTiles
    hidden: HiddenStates | None = None
    """Takes the outputs of layers that somebody wants; None: nobody does."""


class RowInput(NamedTuple):
    """Shape of one row of an input, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RowProbe(NamedTuple):
    """A row function of the model with real weights, and what its inputs look like: for verifying tiles."""

    name: str
    function: RowFunction
    inputs: tuple[RowInput, ...]


class Model(ABC):
    """A causal transformer over a paged KV pool. Weights are filled once, before the first forward.

    is_batch_invariant: with verified tiles a row's bits depend on its own sequence alone.
    tasks: with GENERATE among them `logits` works, with EMBED `final_hidden`, with SCORE `scores`.
    """

    is_batch_invariant: bool = True
    tasks: frozenset[Task] = frozenset({Task.GENERATE, Task.EMBED})
    shows_hidden: bool = False
    """True if `forward` fills `ModelBatch.hidden`, and there are `hidden_size` and `embed`."""
    hidden_size: int
    vocab_size: int
    max_total_len: int
    kv_layout: KvLayout
    attention_shape: AttentionShape

    @abstractmethod
    def forward(self, batch: ModelBatch) -> torch.Tensor:
        """Writes the KV of all tokens and returns the last layer's output, [T, hidden], before the final norm."""

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T, hidden]: embedding of tokens as the checkpoint has it, for networks that draft for this model."""
        raise AssertionError(f"{type(self).__name__} shows no hidden states")

    @abstractmethod
    def logits(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """float32 [T, vocabulary] of rows of `forward`'s output; T is a number of rows that `tiles` can cover."""

    @abstractmethod
    def final_hidden(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """float32 [T, hidden]: rows of `forward`'s output after the final norm, for embed tasks; T as for `logits`."""

    def scores(self, hidden_TD: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
        """float32 [T]: the score of a prompt by its last token, for rows of `forward`'s output; T as for `logits`."""
        raise AssertionError(f"{type(self).__name__} has no score head and does not offer the task")

    @abstractmethod
    def row_probes(self) -> tuple[RowProbe, ...]:
        """Every function that this model gives to `RowTiles.map`: of each layer and each expert, so that no matrix is
        left out. Functions of one name have inputs and weights of the same shapes."""

    def routed_experts(self) -> tuple[RoutedExperts, ...]:
        """The experts of each layer that has some, in the order of the layers. Default: there are none."""
        return ()


class KvHeads(NamedTuple):
    """The KV heads of a rank out of all `total` of the model."""

    total: int
    share: Share


class BuiltModel(NamedTuple):
    """A model with unfilled weights, and which tensor of a checkpoint goes where. kv_heads: None where it has all.
    expert_sources: beside Model.routed_experts()."""

    model: Model
    targets: TensorTargets
    kv_heads: KvHeads | None = None
    expert_sources: tuple[ExpertSource, ...] = ()


class ModelFamily(ABC):
    """All architectures that one folder implements."""

    @abstractmethod
    def build(self, config: ConfigReader, placement: Placement) -> BuiltModel:
        """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED naming the key of the config."""
