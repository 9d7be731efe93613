"""Logits on the host: of host-sampled segments, whose logprobs are wanted, and for comparing in tests and benches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import FloatArray
from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.runner import Segment, SegmentOutput
from radixmesh.daemons.worker.sampling.logprobs import token_logprobs
from radixmesh.daemons.worker.sampling.sampler import sample_tokens

# Rows that are on the device at a time: a long chunk over a large vocabulary would take gigabytes.
_ROWS = 128


@dataclass(frozen=True, slots=True)
class HostSampledSegment:
    """A segment that is sampled on the host: a copy of it, and its rows of hidden states."""

    segment: Segment
    hidden_TD: torch.Tensor

    @classmethod
    def of(cls, segment: Segment, hidden_TD: torch.Tensor) -> HostSampledSegment:
        """A copy: the host's tables change while the step runs."""
        return cls(_copied(segment), hidden_TD)


class HostLogits:
    """Computes them behind what the device was given so far, and waits for them."""

    def __init__(self, device: Device, model: DeviceModel) -> None:
        self._device = device
        self._model = model

    @torch.inference_mode()
    def of(self, hidden_TD: torch.Tensor) -> FloatArray:
        """float32 [T, vocabulary] of rows of hidden states."""
        with self._device.in_order():
            return np.concatenate([self._few(rows_TD) for rows_TD in torch.split(hidden_TD, _ROWS)])

    @torch.inference_mode()
    def output_of(self, host_sampled: HostSampledSegment, token: int | None) -> SegmentOutput:
        """The output of a host-sampled segment; `token` where the device sampled it already."""
        segment, logprobs = host_sampled.segment, None
        with self._device.in_order():
            if segment.sample is not None and token is None:
                row = self._few(host_sampled.hidden_TD[-1:])
                token = sample_tokens(row, [segment.sample])[0]
                num_top = segment.sample.sampling.num_top_logprobs
                logprobs = None if num_top is None else token_logprobs(row, [token], num_top)
            prompt_logprobs = self._prompt_logprobs(host_sampled) if segment.prompt_logprobs is not None else None
        return SegmentOutput(token=token, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _prompt_logprobs(self, host_sampled: HostSampledSegment) -> TokenLogprobs:
        segment, wanted = host_sampled.segment, host_sampled.segment.prompt_logprobs
        assert wanted is not None
        # Position p is predicted by the row of p - 1.
        hidden_TD = host_sampled.hidden_TD[wanted.start - 1 - segment.start : wanted.stop - 1 - segment.start]
        ids = segment.prompt_ids[wanted.start : wanted.stop].tolist()
        parts = [
            token_logprobs(
                self._few(hidden_TD[first : first + _ROWS]), ids[first : first + _ROWS], segment.prompt_num_top
            )
            for first in range(0, len(ids), _ROWS)
        ]
        return TokenLogprobs(
            own=np.concatenate([part.own for part in parts]),
            num_top=parts[0].num_top,
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top=np.concatenate([part.top for part in parts]),
        )

    def _few(self, hidden_TD: torch.Tensor) -> FloatArray:
        rows: FloatArray = self._model.logits(hidden_TD.contiguous()).float().cpu().numpy()
        return rows


def _copied(segment: Segment) -> Segment:
    """The same with arrays of its own."""
    sample = segment.sample
    if sample is not None:
        sample = replace(sample, output_ids=sample.output_ids.copy())
    return replace(segment, ids=segment.ids.copy(), pages=segment.pages.copy(), sample=sample)
