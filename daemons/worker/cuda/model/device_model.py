"""The seam between a model on a device and the runner, the loader, memory, graphs and tuning, which see nothing else.

    LoadedModel   the weights and what follows from them        made once
    DeviceModel   the model over a KV pool, with its kernels    made anew for every pool

Legend: T rows, D hidden size, V vocabulary, N features out, K features in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch, DispatchedExperts
from radixmesh.daemons.worker.cuda.experts import Experts, Fp8Experts, PlainExperts
from radixmesh.daemons.worker.cuda.fp8.expert_weights import ExpertMatrices
from radixmesh.daemons.worker.cuda.fp8.ops import Fp8Ops
from radixmesh.daemons.worker.cuda.fp8.weights import Matrix
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue
from radixmesh.daemons.worker.cuda.linear import Fp8Linear, Linear, PlainLinear
from radixmesh.daemons.worker.cuda.model.half_batches import HalfBatch, Stages
from radixmesh.daemons.worker.cuda.ops import Ops
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.cuda.ranks.reduced_linear import ReducedLinear
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch
from radixmesh.daemons.worker.experts.expert_moves import ReadExperts
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlanes
from radixmesh.daemons.worker.models.model import HiddenStates, KvHeads
from radixmesh.daemons.worker.models.vocabulary import ShardedVocabulary
from radixmesh.kernels.fp8.quantized import QuantizedMatrix
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts
from radixmesh.kernels.rope_kv import KvTarget


@dataclass(frozen=True, slots=True)
class TunableMatrices:
    """Matrices [N, K] of one shape and epilogue, from all layers. has_deferred_norm: their GEMMs take rows before the
    norm, whose weights are folded into the matrices; the result is scaled by each row's inverse RMS."""

    matrices: tuple[Matrix, ...]
    epilogue: GemmEpilogue
    has_deferred_norm: bool = False


@dataclass(frozen=True, slots=True)
class SharedOut:
    """Experts that several ranks share: what carries rows there, and where they are when weights are loaded."""

    dispatch: DeviceDispatch
    placed: ExpertDispatch

    def next_rows(self, target: KvTarget) -> None:
        """Says which rows the next forward has: those of the last slot are padding."""
        self.dispatch.next_rows(target.row_slots_T, len(target.page_tables) - 1)


@dataclass(frozen=True, slots=True)
class Kernels:
    """plain: operations in the model's dtype. fp8: those on FP8 matrices; None where the model has none. group: the
    ranks that hold the model together; None: this one alone does. experts: the ranks that share its experts, and which
    of them holds which; None: this one has all."""

    plain: Ops
    fp8: Fp8Ops | None = None
    group: DeviceGroup | None = None
    experts: SharedOut | None = None


class LoadedModel(ABC):
    """The weights of a model on a device.

    max_total_len: tokens of a request at most. windows: by layer, how many tokens one sees; None = all before it.
    kv_layout: planes of the KV pool, before an attention backend pads them. quantization: "none", or the form of the
    layers' matrices. num_plain: how many of those are in the model's dtype nevertheless; None if all are.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_total_len: int
    dtype: torch.dtype
    tasks: frozenset[Task]
    kv_layout: KvLayout
    attention_shape: AttentionShape
    windows: tuple[int | None, ...]
    attention_chunks: tuple[int, ...] = ()
    """Different ones of the layers that attend within chunks of a sequence."""
    has_sinks: bool = False
    quantization: str
    num_plain: int | None
    can_capture: bool = True
    """False: a forward waits for the device, and is launched kernel by kernel."""
    shows_hidden: bool = False
    """True if `layers` of its model fills `hidden`."""
    kv_heads: KvHeads | None = None
    """Those of this rank; None: it has all."""
    num_experts: int = 0
    """Routed ones of a layer that has any, on all ranks."""
    read_experts: ReadExperts | None = None
    """Fills slots of shared experts from the checkpoint; None: weights are random, or no ranks share any."""
    latent_rank: int | None = None
    """Of a model that caches latents: how many of a token's numbers are its values. None: keys and values."""

    @abstractmethod
    def tunable_matrices(self) -> tuple[TunableMatrices, ...]:
        """The largest share of a step first."""

    @abstractmethod
    def row_bytes(self) -> int:
        """Memory of the activations of one row on its way through a layer."""

    def expert_row_bytes(self) -> int:
        """Memory of one row on its way through its experts alone: that of rows of other ranks. Default: none."""
        return 0

    def expert_bytes(self) -> int:
        """Of the weights of one routed expert. Default: there are none."""
        return 0

    @abstractmethod
    def position_bytes(self) -> int:
        """Memory of the tables by position, for each position that a request may have."""

    @abstractmethod
    def create(self, kernels: Kernels, kv: KvPlanes, max_total_len: int) -> DeviceModel:
        """The model over a pool, for requests of up to max_total_len tokens."""


class DeviceModel(ABC):
    """A causal transformer over a paged KV pool. Work goes to the current stream and may be captured.

    tasks: with GENERATE among them `logits` works, with EMBED `final_hidden`, with SCORE `scores`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    dtype: torch.dtype
    tasks: frozenset[Task]
    embedding_VD: torch.Tensor
    """A kernel at the beginning of a decode step reads the rows' embeddings from it; where a model embeds in `layers`,
    it holds the ids themselves, [V, 1] int32."""

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T, D], a new tensor. ids int32."""
        return functional.embedding(ids_T, self.embedding_VD)

    def each_kind_once(self) -> AbstractContextManager[None]:
        """`layers` launches but one layer of each kind inside, unless it is asked for hidden states: for compiling. Its
        result is of no use. Default: all layers."""
        return nullcontext()

    @abstractmethod
    def layers(
        self, x_TD: torch.Tensor, target: KvTarget, attention: StepAttention, hidden: HiddenStates | None = None
    ) -> torch.Tensor:
        """Writes the KV of all rows; [T, D] after the last layer, before the final norm. May overwrite x, the rows'
        embeddings. hidden: takes the outputs of layers, of a model that shows them; None: nobody wants any."""

    def stages(self, half: HalfBatch) -> Stages:
        """As `layers`, in pieces: yields while rows are under way to the ranks that share the experts."""
        raise AssertionError(f"{type(self).__name__} has no experts to share")

    @abstractmethod
    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """[T, V] of rows of `layers`' result, in the model's dtype."""

    @abstractmethod
    def final_hidden(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """float32 [T, D]: rows of `layers`' result after the final norm."""

    def shared_experts(self) -> tuple[DispatchedExperts, ...]:
        """The experts of each layer that has routed ones, which are divided among ranks. Default: none are."""
        return ()

    def scores(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """float32 [T]: the score of a prompt by its last token, for rows of `layers`' result."""
        raise AssertionError(f"{type(self).__name__} has no score head and does not offer the task")


def create_linear(kernels: Kernels, w: Matrix, b_N: torch.Tensor | None) -> Linear:
    """The kind of Linear that the matrix is for."""
    if isinstance(w, QuantizedMatrix):
        assert kernels.fp8 is not None, "FP8 weights, and no kernels for them"
        return Fp8Linear(kernels.fp8, w, b_N)
    return PlainLinear(kernels.plain, w, b_N)


def create_output_linear(kernels: Kernels, w: Matrix, b_N: torch.Tensor | None) -> Linear:
    """As `create_linear`, of a projection whose features in are divided among the ranks, if there are some."""
    if kernels.group is None:
        return create_linear(kernels, w, b_N)
    return ReducedLinear(create_linear(kernels, w, None), b_N, kernels.group, kernels.plain.gemm)


def create_vocabulary(kernels: Kernels, vocab_size: int) -> ShardedVocabulary | None:
    """Embedding and logits where the ranks divide the vocabulary; None: it is whole."""
    return None if kernels.group is None else ShardedVocabulary(vocab_size, kernels.group)


def ids_as_embedding(vocab_size: int, device: torch.device) -> torch.Tensor:
    """`DeviceModel.embedding_VD` of a model that embeds in `layers`."""
    return torch.arange(vocab_size, dtype=torch.int32, device=device)[:, None]


def create_experts(kernels: Kernels, w: ExpertMatrices) -> Experts:
    """The kind of Experts that the weights are for."""
    if isinstance(w, QuantizedExperts):
        assert kernels.fp8 is not None, "FP8 experts, and no kernels for them"
        return Fp8Experts(kernels.fp8, w)
    return PlainExperts(kernels.plain, w.w_gate_up_E2FD, w.w_down_EDF)


def share_out(kernels: Kernels, local: Experts, num_experts: int, norm_D: torch.Tensor) -> Experts:
    """The experts of a layer, of which `local` are those of this rank; norm_D: of the rows."""
    shared = kernels.experts
    if shared is None:
        return local
    return DispatchedExperts(local, shared.dispatch, shared.placed, num_experts, norm_D, kernels.plain)
