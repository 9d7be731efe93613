"""Logits on the host: for logprobs of prompt tokens, and for comparing in tests and benches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import FloatArray
from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.runner import Segment
from radixmesh.daemons.worker.sampling.logprobs import token_logprobs

# Rows that are on the device at a time: a long chunk over a large vocabulary would take gigabytes.
_ROWS = 128


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A chunk whose logprobs are wanted: a copy of it, and its rows of hidden states."""

    segment: Segment
    hidden_TD: torch.Tensor

    @classmethod
    def of(cls, segment: Segment, hidden_TD: torch.Tensor) -> KeptPrompt:
        """A copy: the host's tables change while the step runs."""
        own = replace(segment, ids=segment.ids.copy(), pages=segment.pages.copy(), sample=None)
        return cls(own, hidden_TD)


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
    def prompt_logprobs(self, kept: KeptPrompt) -> TokenLogprobs:
        """Of the prompt tokens that the chunk predicts; waits for them."""
        segment, wanted = kept.segment, kept.segment.prompt_logprobs
        assert wanted is not None
        # Position p is predicted by the row of p - 1.
        hidden_TD = kept.hidden_TD[wanted.start - 1 - segment.start : wanted.stop - 1 - segment.start]
        ids = segment.prompt_ids[wanted.start : wanted.stop].tolist()
        with self._device.in_order():
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
