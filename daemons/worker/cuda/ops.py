"""The seam between the decoder's maths and what computes it: fused kernels on a GPU, plain torch anywhere.

Legend: T rows, D hidden size, N features out, K features in, H heads, d head_dim, F mlp size. Weights are [out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, TiledGemm, TorchGemm
from radixmesh.kernels import gemv
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.mla_rows import (
    LatentNorm,
    head_gemm,
    head_gemm_reference,
    mla_rows,
    mla_rows_reference,
)
from radixmesh.kernels.moe.choose_slots import TokenRows, choose_slots, choose_slots_reference
from radixmesh.kernels.moe.experts_config import default_config
from radixmesh.kernels.moe.grouped_gemm import (
    SWIGLU,
    ExpertVariant,
    SlotRows,
    routed_experts,
    routed_experts_reference,
    slot_experts,
    slot_experts_reference,
)
from radixmesh.kernels.moe.route import RouterRule, Routes, route, route_reference
from radixmesh.kernels.moe.router_logits import router_logits, router_logits_reference
from radixmesh.kernels.moe.row_experts import RowNorm, SharedWeights, row_experts
from radixmesh.kernels.moe.shared_mlp import shared_mlp
from radixmesh.kernels.rms_norm import rms_norm, rms_norm_reference
from radixmesh.kernels.rope_kv import (
    HeadNorms,
    HeadShape,
    KvTarget,
    RopeAngles,
    rope_write_kv,
    rope_write_kv_reference,
)
from radixmesh.kernels.silu_mul import silu_mul, silu_mul_reference

# Rows up to which the project's kernels by head are taken; libraries compute more of them. Not measured.
_FEW_ROWS = 32
_MOST_ROWS_BESIDE = 512


BesideMlp = Callable[[], torch.Tensor]
"""Gives what an MLP made of its rows [T, D]: the current stream waits for it, and may use it until it is let go."""


class Ops(ABC):
    """Operations on rows, each in the dtype of its input with sums in float32. eps is that of norms."""

    max_fused_rows: int = 0
    """Largest number of rows for which `linear_fused` and `gate_up_silu` are used."""
    gemm: GemmBackend = TorchGemm()

    @abstractmethod
    def rms_norm(self, x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor: ...

    @abstractmethod
    def rope_write_kv(
        self,
        qkv: DeferredNormGemm,
        angles: RopeAngles,
        target: KvTarget,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        heads: HeadShape,
        norms: HeadNorms,
        factors_X: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys with RoPE, and values, into the pool; returns queries with RoPE, [T, H, d].

        factors_X: of a pool with scales, `head_factors`.
        """

    @abstractmethod
    def silu_mul(self, gate_up: DeferredNormGemm, eps: float) -> torch.Tensor: ...

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        return self.gemm.linear(x_TK, w_NK)

    def add_linear(
        self, x_TK: torch.Tensor, w_NK: torch.Tensor, b_N: torch.Tensor | None, residual_TN: torch.Tensor
    ) -> None:
        """Adds the GEMM and the bias to the residual in place."""
        self.gemm.add_linear(x_TK, w_NK, residual_TN)
        if b_N is not None:
            residual_TN += b_N
            self.gemm.changed()

    def gate_up_silu_deferred_norm(self, x_TD: torch.Tensor, w_2FD: torch.Tensor, eps: float) -> torch.Tensor:
        """silu(gate) x up as a deferred-norm GEMM, [T, F]; the norm's weight is folded into w."""
        gated_TF = self.gemm.gate_up_silu(x_TD, w_2FD, eps)
        if gated_TF is not None:
            return gated_TF
        return self.silu_mul(DeferredNormGemm(self.gemm.linear(x_TD, w_2FD), norm_input_TD=x_TD), eps)

    def mla_rows(
        self,
        q_THY: torch.Tensor,
        kv_TC: torch.Tensor,
        norm: LatentNorm,
        angles: RopeAngles,
        target: KvTarget,
        latents_SC: torch.Tensor,
    ) -> torch.Tensor:
        """Writes latents and RoPE keys into the pool; returns queries [T, H, C] of which the RoPE part is set."""
        return mla_rows_reference(q_THY, kv_TC, norm, angles, target, latents_SC)

    def head_gemm(self, x_THK: torch.Tensor, w_HNK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """out[t, h] = w[h] @ x[t, h], [T, H, N]."""
        return head_gemm_reference(x_THK, w_HNK, out)

    def router_logits(self, x_TD: torch.Tensor, w_ED: torch.Tensor, norm: RowNorm | None = None) -> torch.Tensor:
        """x @ w^T in float32, [T, E] or parts of it [P, T, E], which `route` adds; of RMSNorm(x) with a norm, for up to
        max_fused_rows rows."""
        return router_logits_reference(x_TD, w_ED, *(norm or ()))

    def route(self, logits_TE: torch.Tensor, rule: RouterRule, bias_E: torch.Tensor | None = None) -> Routes:
        """The experts that rows pick, and their weights; the bias counts for the choice alone."""
        return route_reference(logits_TE, rule, bias_E)

    def choose_slots(
        self, routes: Routes, table: torch.Tensor, picks_E: torch.Tensor, rank: int, tokens: TokenRows | None
    ) -> Routes:
        """Routes to slots of the experts, whose picks are counted."""
        return Routes(choose_slots_reference(routes.expert_ids_TA, table, picks_E, rank, tokens), routes.weights_TA)

    def experts(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        w_gate_up_E2FD: torch.Tensor,
        w_down_EDF: torch.Tensor,
        variant: ExpertVariant = SWIGLU,
        *,
        residual_TD: torch.Tensor | None = None,
        num_expected: int | None = None,
        beside: BesideMlp | None = None,
    ) -> torch.Tensor:
        """The weighted sum of what each row's experts make of x; a residual is added to it, and becomes the result.
        num_expected: as `routed_experts`. beside: of `start_mlp`, added too."""
        assert beside is None, "nothing is computed beside the experts here"
        out_TD = routed_experts_reference(x_TD, routes, w_gate_up_E2FD, w_down_EDF, residual_TD, variant)
        self.gemm.changed()
        return out_TD if residual_TD is None else residual_TD.copy_(out_TD)

    def start_mlp(self, x_TD: torch.Tensor, weights: SharedWeights) -> BesideMlp | None:
        """Launches an MLP of all rows, which is computed beside what is launched next. None: not here, or not for so
        many rows."""
        return None

    def slot_experts(
        self,
        rows: SlotRows,
        w_gate_up_E2FD: torch.Tensor,
        w_down_EDF: torch.Tensor,
        variant: ExpertVariant = SWIGLU,
    ) -> torch.Tensor:
        """Results of each row by the expert of its slot, where the row lies; anything where no row is."""
        results_PXD = slot_experts_reference(rows, w_gate_up_E2FD, w_down_EDF, variant)
        self.gemm.changed()
        return results_PXD

    def add_row_experts(
        self,
        residual_TD: torch.Tensor,
        norm: RowNorm,
        routes: Routes,
        w_gate_up_E2FD: torch.Tensor,
        w_down_EDF: torch.Tensor,
        shared: SharedWeights | None,
    ) -> None:
        """Adds what the experts of RMSNorm(residual), and a shared MLP, make of it, for up to max_fused_rows rows."""
        raise AssertionError("no fused experts here")

    def linear_fused(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        b_N: torch.Tensor | None = None,
        *,
        add_to_TN: torch.Tensor | None = None,
        norm_K: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """GEMM for up to max_fused_rows rows, added in place to `add_to` if given.

        With eps, x is first RMS-normalised, and multiplied by the norm's weight if there is one.
        """
        raise AssertionError("no fused GEMMs here")

    def gate_up_silu(
        self, x_TD: torch.Tensor, w_2FD: torch.Tensor, norm_D: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """silu(gate) x up of RMSNorm(x), [T, F], for up to max_fused_rows rows."""
        raise AssertionError("no fused GEMMs here")


class TorchOps(Ops):
    """The references of the kernels."""

    def rms_norm(self, x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_reference(x_TD, w_D, eps)

    def rope_write_kv(
        self,
        qkv: DeferredNormGemm,
        angles: RopeAngles,
        target: KvTarget,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        heads: HeadShape,
        norms: HeadNorms,
        factors_X: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return rope_write_kv_reference(qkv, angles, target, keys_SKd, values_SKd, heads, norms, factors_X)

    def silu_mul(self, gate_up: DeferredNormGemm, eps: float) -> torch.Tensor:
        return silu_mul_reference(gate_up.out_TN, norm_input_TD=gate_up.norm_input_TD, bias_2F=gate_up.bias_N, eps=eps)


class TritonOps(Ops):
    """The project's kernels. use_pdl: kernels are launched with PDL (Hopper).

    is_deterministic: GEMMs are computed in tiles of a fixed number of rows, so that a row's bits do not depend on
    how many others there are.
    gemm: backend for more than max_fused_rows rows; None: torch.
    side_stream: for what may run beside other work; None: all is in one order.
    """

    def __init__(
        self,
        *,
        use_pdl: bool = False,
        max_fused_rows: int = 1,
        is_deterministic: bool = False,
        gemm: GemmBackend | None = None,
        side_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._side_stream = side_stream
        self.max_fused_rows = 0 if is_deterministic else max_fused_rows
        self._use_pdl = use_pdl
        self._is_deterministic = is_deterministic
        # One configuration for any number of rows, so that a row's sums are the same beside any others.
        self._experts_config = default_config(1, 1) if is_deterministic else None
        if is_deterministic:
            self.gemm = TiledGemm()
        elif gemm is not None:
            self.gemm = gemm

    def rms_norm(self, x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TD, w_D, eps, use_pdl=self._use_pdl)

    def mla_rows(
        self,
        q_THY: torch.Tensor,
        kv_TC: torch.Tensor,
        norm: LatentNorm,
        angles: RopeAngles,
        target: KvTarget,
        latents_SC: torch.Tensor,
    ) -> torch.Tensor:
        return mla_rows(q_THY, kv_TC, norm, angles, target, latents_SC, use_pdl=self._use_pdl)

    def head_gemm(self, x_THK: torch.Tensor, w_HNK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(x_THK) <= _FEW_ROWS or self._is_deterministic:
            return head_gemm(x_THK, w_HNK, out, use_pdl=self._use_pdl)
        return head_gemm_reference(x_THK, w_HNK, out)

    def router_logits(self, x_TD: torch.Tensor, w_ED: torch.Tensor, norm: RowNorm | None = None) -> torch.Tensor:
        is_deterministic = self._is_deterministic
        return router_logits(x_TD, w_ED, *(norm or ()), use_pdl=self._use_pdl, is_deterministic=is_deterministic)

    def route(self, logits_TE: torch.Tensor, rule: RouterRule, bias_E: torch.Tensor | None = None) -> Routes:
        return route(logits_TE, rule, bias_E, use_pdl=self._use_pdl)

    def choose_slots(
        self, routes: Routes, table: torch.Tensor, picks_E: torch.Tensor, rank: int, tokens: TokenRows | None
    ) -> Routes:
        return Routes(choose_slots(routes.expert_ids_TA, table, picks_E, rank, tokens), routes.weights_TA)

    def experts(
        self,
        x_TD: torch.Tensor,
        routes: Routes,
        w_gate_up_E2FD: torch.Tensor,
        w_down_EDF: torch.Tensor,
        variant: ExpertVariant = SWIGLU,
        *,
        residual_TD: torch.Tensor | None = None,
        num_expected: int | None = None,
        beside: BesideMlp | None = None,
    ) -> torch.Tensor:
        out_TD = routed_experts(
            x_TD,
            routes,
            w_gate_up_E2FD,
            w_down_EDF,
            residual_TD=residual_TD,
            out=residual_TD,
            config=self._experts_config,
            variant=variant,
            num_expected=num_expected,
            beside=beside,
            use_pdl=self._use_pdl and len(x_TD) > 1,
        )
        self.gemm.changed()
        return out_TD

    def start_mlp(self, x_TD: torch.Tensor, weights: SharedWeights) -> BesideMlp | None:
        # Memory of one stream is not reused by another: that of many rows would be missed.
        if self._is_deterministic or len(x_TD) > _MOST_ROWS_BESIDE:
            return None
        side = self._side_stream
        if side is None:
            result_TD = shared_mlp(x_TD, weights, use_pdl=self._use_pdl)
            return lambda: result_TD
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result_TD = shared_mlp(x_TD, weights, use_pdl=self._use_pdl)

        def joined() -> torch.Tensor:
            current.wait_stream(side)
            return result_TD

        return joined

    def slot_experts(
        self,
        rows: SlotRows,
        w_gate_up_E2FD: torch.Tensor,
        w_down_EDF: torch.Tensor,
        variant: ExpertVariant = SWIGLU,
    ) -> torch.Tensor:
        results_PXD = slot_experts(
            rows, w_gate_up_E2FD, w_down_EDF, config=self._experts_config, variant=variant, use_pdl=self._use_pdl
        )
        self.gemm.changed()
        return results_PXD

    def add_row_experts(
        self,
        residual_TD: torch.Tensor,
        norm: RowNorm,
        routes: Routes,
        w_gate_up_E2FD: torch.Tensor,
        w_down_EDF: torch.Tensor,
        shared: SharedWeights | None,
    ) -> None:
        row_experts(
            residual_TD,
            routes,
            w_gate_up_E2FD,
            w_down_EDF,
            norm=norm,
            shared=shared,
            residual_TD=residual_TD,
            out=residual_TD,
            use_pdl=self._use_pdl,
        )
        self.gemm.changed()

    def rope_write_kv(
        self,
        qkv: DeferredNormGemm,
        angles: RopeAngles,
        target: KvTarget,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        heads: HeadShape,
        norms: HeadNorms,
        factors_X: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return rope_write_kv(qkv, angles, target, keys_SKd, values_SKd, heads, norms, factors_X, use_pdl=self._use_pdl)

    def silu_mul(self, gate_up: DeferredNormGemm, eps: float) -> torch.Tensor:
        return silu_mul(
            gate_up.out_TN,
            norm_input_TD=gate_up.norm_input_TD,
            bias_2F=gate_up.bias_N,
            eps=eps,
            # cuBLAS's kernels signal nothing: behind one of them an early launch comes later than a usual one.
            use_pdl=self._use_pdl and len(gate_up.out_TN) <= self.max_fused_rows,
        )

    def linear_fused(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        b_N: torch.Tensor | None = None,
        *,
        add_to_TN: torch.Tensor | None = None,
        norm_K: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        return gemv.linear(x_TK, w_NK, b_N, add_to_TN, norm_K, eps, out=add_to_TN, use_pdl=self._use_pdl)

    def gate_up_silu(
        self, x_TD: torch.Tensor, w_2FD: torch.Tensor, norm_D: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return gemv.gate_up_silu(x_TD, w_2FD, norm_D, eps, use_pdl=self._use_pdl)
