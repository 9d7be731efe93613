"""Sampling on the device, with options kept there by slot. Options are sent once, when a request is admitted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.sampling import MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.step.outputs.token_ring import NOBODY, Asking
from radixmesh.daemons.worker.cuda.step.sampling.slot_chains import SlotChains
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.limits import MAX_SUPPRESSED_IDS
from radixmesh.kernels.sampling.grow_trees import Candidates, RankScratch, rank_drafts
from radixmesh.kernels.sampling.logprobs import LogprobScratch, compile_logprobs, token_logprobs
from radixmesh.kernels.sampling.sample import (
    SampleScratch,
    SlotRows,
    TokenTarget,
    compile_sampling,
    sample_rows,
)
from radixmesh.kernels.sampling.sample_params import Branches, Needs, SampleParams
from radixmesh.kernels.sampling.write_slots import SlotColumns

_INT32_MAX = 2**31 - 1
_COLUMNS = (
    "temperature_S",
    "seed_S",
    "top_k_S",
    "top_p_S",
    "min_p_S",
    "repetition_S",
    "frequency_S",
    "presence_S",
    "prompt_len_S",
    "num_biases_S",
    "num_suppressed_S",
    "num_top_S",
    "min_tokens_S",
)
"""Of SampleParams, as _record() has them."""
_GREEDY = (0.0, 0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 0, -1, 0)
"""As SampleParams.allocate() leaves them."""
# Asked for in every step: an enum's own operators take microseconds.
_LOGPROBS, _FILTERED = int(Needs.LOGPROBS), int(Needs.FILTERS | Needs.PENALTIES)
_BEYOND_UNFILTERED = _FILTERED | _LOGPROBS


class SlotSampler:
    """Parameters of all slots, and a dummy that is greedy. Lists are sent only for slots that need them."""

    def __init__(
        self,
        num_slots: int,
        *,
        max_rows: int,
        vocab_size: int,
        max_total_len: int,
        device: Device,
        masks: SlotMasks | SlotChains | None = None,
        keeps_tokens: bool = False,
    ) -> None:
        """keeps_tokens: tokens_SL has those of all slots, not only of slots with penalties: drafters look there."""
        self._keeps_tokens = keeps_tokens
        self._device, self._masks = device, masks
        where = device.torch_device
        self._needs = np.zeros(num_slots + 1, np.uint8)
        self._has_options = np.zeros(num_slots + 1, np.bool_)
        self._params = SampleParams.allocate(
            num_slots,
            max_total_len=max_total_len,
            max_biases=MAX_LOGIT_BIASES,
            max_suppressed=MAX_SUPPRESSED_IDS,
            device=where,
        )
        self._columns = SlotColumns([getattr(self._params, name) for name in _COLUMNS])
        self._max_rows, self.vocab_size = max_rows, vocab_size
        self._scratch = SampleScratch(max_rows, vocab_size, where, has_penalties=False)
        self._penalty_scratch: SampleScratch | None = None
        self._admitted: dict[int, Admit] = {}
        self._logprob_scratch = LogprobScratch(max_rows, MAX_TOP_LOGPROBS, where)
        self._num_top = np.full(num_slots + 1, -1, np.int32)

    @property
    def tokens_SL(self) -> torch.Tensor:
        """Prompt and output of slots with penalties, or with keeps_tokens of all, int32 [slots + 1, max_total_len]."""
        return self._params.tokens_SL

    def tokens_of(
        self,
        logits_TV: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: IntArray,
        target: TokenTarget,
        ring_RTL: torch.Tensor,
        *,
        is_sampled: bool,
    ) -> Asking:
        """Samples rows into `target` under the masks of their slots, and writes the logprobs that they ask for into
        `ring_RTL`: those of the logits as they were. Returns the rows that ask.

        is_sampled: `sample_unfiltered` of the same logits ran just before; rows without filters, penalties and masks
        are done then.
        """
        asking, masks = self.asking(host_slots), self._masks
        as_they_were_TV = logits_TV
        if masks is not None and masks.is_guided(host_slots):
            if asking.rows:
                as_they_were_TV = logits_TV.clone()
            masks.apply(logits_TV, slots, positions, self._scratch.highest_TS if is_sampled else None)
            self.sample(logits_TV, slots, positions, host_slots, target, has_highest=is_sampled)
            masks.settle(slots, positions, target, self.tokens_SL)
        elif not is_sampled or not self.is_unfiltered(host_slots):
            self.sample(logits_TV, slots, positions, host_slots, target, has_highest=is_sampled)
        self.logprobs(as_they_were_TV, slots, target, ring_RTL, asking)
        return asking

    def is_done_unfiltered(self, host_slots: IntArray) -> bool:
        """`sample_unfiltered` is all that these slots ask for: no filters, penalties, logprobs or masks."""
        is_guided = self._masks is not None and self._masks.is_guided(host_slots)
        return not is_guided and not self._need_bits(host_slots) & _BEYOND_UNFILTERED

    def is_unfiltered(self, host_slots: IntArray) -> bool:
        """`sample_unfiltered` is all that these slots ask for, but for logprobs and masks."""
        return not self._need_bits(host_slots) & _FILTERED

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles every variant of the sampling kernels for logits of `dtype`."""
        # The dummy slot stays as it is.
        self._write([self._columns.record(len(self._needs) - 1, *_GREEDY)])
        compile_sampling(self._params, self.vocab_size, dtype)
        compile_logprobs(self._params, self.vocab_size, dtype)
        if self._masks is not None:
            self._masks.warm_up(dtype, self.vocab_size, self.tokens_SL)

    def warm_up_branches(self, dtype: torch.dtype, branches: Branches) -> None:
        """The same for rows of branches, of which the first one is taken."""
        compile_sampling(self._params, self.vocab_size, dtype, Branches(branches.starts_T[:1], branches.ids_TD[:1]))

    def admitted(self, admit: Admit) -> None:
        """A request took a slot. What it asks for is sent with the next step."""
        if self._masks is not None:
            self._masks.admitted(admit)
        self._needs[admit.slot] = needs_of(admit)
        num_top = admit.sampling.num_top_logprobs
        self._num_top[admit.slot] = -1 if num_top is None else min(num_top, self.vocab_size)
        self._admitted[admit.slot] = admit

    def send(self) -> None:
        """Brings the options of requests admitted since to the device, behind all work so far."""
        if self._masks is not None:
            self._masks.send()
        if not self._admitted:
            return
        if self._keeps_tokens:
            for admit in self._admitted.values():
                self._send_tokens(admit)
        # A slot that needs nothing must not keep what another request asked for: its neighbours may need noise.
        slots_with_options = self._needs.astype(np.bool_) | self._has_options
        admits, self._admitted = [a for a in self._admitted.values() if slots_with_options[a.slot]], {}
        if not admits:
            return
        for admit in admits:
            self._has_options[admit.slot] = bool(self._needs[admit.slot])
        self._write([self._record(admit) for admit in admits])
        for admit in admits:
            if self._needs[admit.slot] & Needs.PENALTIES:
                self._send_lists(admit)

    def sample_unfiltered(
        self,
        logits_TV: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        target: TokenTarget,
        *,
        use_pdl: bool = False,
    ) -> None:
        """Samples every row by its slot's temperature and seed, without filters and penalties, whatever the slot asks
        for, so that a graph can record it. Drafts are sampled so too."""
        rows = SlotRows(self._params, slots, positions)
        sample_rows(logits_TV, rows, self._scratch, target, Needs.NOISE, use_pdl=use_pdl)

    def rank_drafts(
        self,
        logits_RV: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        scratch: RankScratch,
        level: int,
        found: Candidates,
    ) -> None:
        """The ids that `sample_unfiltered` is likeliest to take become candidates of a level of trees."""
        rank_drafts(logits_RV, slots, positions, self._params, scratch, level, found)

    def sample(
        self,
        logits_TV: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        host_slots: IntArray,
        target: TokenTarget,
        *,
        has_highest: bool = False,
        branches: Branches | None = None,
    ) -> None:
        """Samples a token from each row of logits into `target`. slots and positions: int32 [rows] on the device.

        has_highest: `sample_unfiltered` ran on the same logits just before. branches: of rows that are not behind all
        of their slot's tokens.
        """
        needs = self._needs_of(host_slots)
        scratch = self._with_penalties() if Needs.PENALTIES in needs else self._scratch
        rows = SlotRows(self._params, slots, positions, branches)
        sample_rows(logits_TV, rows, scratch, target, needs, has_highest=has_highest)

    def asking(self, host_slots: IntArray) -> Asking:
        """The rows of `host_slots` whose requests ask for logprobs."""
        if not self._need_bits(host_slots) & _LOGPROBS:
            return NOBODY
        num_top = self._num_top[host_slots]
        rows = np.flatnonzero(num_top >= 0)
        return Asking(rows.tolist(), num_top[rows].tolist())

    def logprobs(
        self, logits_TV: torch.Tensor, slots: torch.Tensor, target: TokenTarget, ring_RTL: torch.Tensor, asking: Asking
    ) -> None:
        """Writes the logprobs of the tokens in `target`, and of alternatives, into `ring_RTL`, of the rows that ask."""
        if asking.rows:
            token_logprobs(
                logits_TV,
                slots,
                self._params.num_top_S,
                target.ring_RT,
                target.ring_index_1,
                self._logprob_scratch,
                ring_RTL,
            )

    def _needs_of(self, host_slots: IntArray) -> Needs:
        return Needs(self._need_bits(host_slots))

    def _need_bits(self, host_slots: IntArray) -> int:
        return int(np.bitwise_or.reduce(self._needs[host_slots], initial=0))

    def _with_penalties(self) -> SampleScratch:
        """Made when first needed: it is large."""
        if self._penalty_scratch is None:
            where = self._device.torch_device
            self._penalty_scratch = SampleScratch(self._max_rows, self.vocab_size, where, has_penalties=True)
        return self._penalty_scratch

    def _write(self, records: Sequence[bytes]) -> None:
        [sent] = self._on_device(self._columns.packed(records))
        self._columns.write(sent)

    def _record(self, admit: Admit) -> bytes:
        """Of a request, by _COLUMNS."""
        sampling = admit.sampling
        seed = sampling.seed or 0
        return self._columns.record(
            admit.slot,
            sampling.temperature,
            seed - (seed >> 63 << 64),
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            len(admit.prompt_ids),
            len(sampling.logit_bias),
            len(admit.suppressed_ids),
            int(self._num_top[admit.slot]),
            min(admit.min_tokens, _INT32_MAX),
        )

    def _send_lists(self, admit: Admit) -> None:
        params, slot = self._params, admit.slot
        if not self._keeps_tokens:
            self._send_tokens(admit)
        if admit.sampling.logit_bias:
            ids, values = zip(*admit.sampling.logit_bias, strict=True)
            bias_ids, biases = self._on_device(np.array(ids, np.int32), np.array(values, np.float32))
            params.bias_ids_SB[slot, : len(ids)] = bias_ids
            params.bias_values_SB[slot, : len(ids)] = biases
        if len(admit.suppressed_ids):
            [params.suppressed_ids_SU[slot, : len(admit.suppressed_ids)]] = self._on_device(admit.suppressed_ids)

    def _send_tokens(self, admit: Admit) -> None:
        ids = np.concatenate((admit.prompt_ids, admit.output_ids)).astype(np.int32, copy=False)
        [self._params.tokens_SL[admit.slot, : len(ids)]] = self._on_device(ids)

    def _on_device(self, *columns: npt.NDArray[np.generic]) -> list[torch.Tensor]:
        """The same on the device, by one upload. Numbers of 4 or 8 bytes, one dimension each."""
        ends = list(accumulate(-(-column.nbytes // 8) * 8 for column in columns))
        packed, parts = np.zeros(ends[-1] if ends else 0, np.uint8), []
        sent = torch.empty(len(packed) // 4, dtype=torch.int32, device=self._device.torch_device)
        for column, start in zip(columns, [0, *ends], strict=False):
            packed[start : start + column.nbytes] = np.ascontiguousarray(column).view(np.uint8)
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
            parts.append(sent[start // 4 : (start + column.nbytes) // 4].view(dtype))
        self._device.upload(packed.view(np.int32), sent)
        return parts


def needs_of(admit: Admit) -> Needs:
    """Sampling options of a request."""
    sampling, needs = admit.sampling, Needs.NOTHING
    if not sampling.is_greedy:
        needs |= Needs.NOISE
        if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            needs |= Needs.FILTERS
    is_penalised = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1, 0, 0)
    if is_penalised or sampling.logit_bias or (admit.min_tokens and len(admit.suppressed_ids)):
        needs |= Needs.PENALTIES
    if sampling.num_top_logprobs is not None:
        needs |= Needs.LOGPROBS
    return needs
