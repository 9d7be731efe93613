"""Every sampling parameter reaches the device's sampler: columns by slot, the kernels that a step needs, and these."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from support.device_samples import new_target
from support.sampling_fields import ALL, LOGPROBS, changed

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.device import CudaDevice, HostDevice
from radixmesh.daemons.worker.cuda.step.sampling import slot_sampler
from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler, needs_of
from radixmesh.kernels.sampling.sample_params import Needs, SampleParams

_ROWS, _VOCAB = 24, 13


def _admit(sampling: Sampling) -> Admit:
    return Admit(
        slot=1,
        generation=1,
        request_id="r",
        prompt_ids=as_ints([1, 2]),
        output_ids=as_ints([4, 4, 5]),
        max_total_len=20,
        sampling=sampling,
    )


@pytest.mark.parametrize("field", [field for field in ALL if field not in LOGPROBS])
def test_a_field_changes_what_a_device_samples(field: str, device: torch.device) -> None:
    logits_TV = torch.from_numpy(np.random.default_rng(3).normal(0, 1, (_ROWS, _VOCAB)).astype(np.float32)).to(device)

    used = CudaDevice() if device.type == "cuda" else HostDevice()

    def sampled(sampling: Sampling) -> list[int]:
        sampler = SlotSampler(2, max_rows=_ROWS, vocab_size=_VOCAB, max_total_len=20, device=used)
        sampler.admitted(_admit(sampling))
        sampler.send()
        target = new_target(_ROWS, 2, device, ring_index=0)
        slots = torch.ones(_ROWS, dtype=torch.int32, device=device)
        sampler.sample(logits_TV, slots, torch.full_like(slots, 5), as_ints([1] * _ROWS), target)
        tokens: list[int] = target.ring_RT[0].tolist()
        return tokens

    assert sampled(changed(field)) != sampled(Sampling())


def test_logprobs_are_a_need_of_their_own() -> None:
    """Those of the prompt come from prompt rows, which ask for them apart."""
    assert Needs.LOGPROBS in needs_of(_admit(changed("num_top_logprobs")))
    assert Needs.LOGPROBS not in needs_of(_admit(changed("prompt_logprobs")))


def test_a_warm_up_leaves_all_slots_greedy(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compile_sampling", "compile_logprobs"):
        monkeypatch.setattr(slot_sampler, name, lambda *arguments: None)
    made, allocate = list[SampleParams](), SampleParams.allocate
    monkeypatch.setattr(
        SampleParams, "allocate", lambda *sizes, **more: made.append(allocate(*sizes, **more)) or made[0]
    )
    used = CudaDevice() if device.type == "cuda" else HostDevice()
    sampler = SlotSampler(2, max_rows=_ROWS, vocab_size=_VOCAB, max_total_len=20, device=used)
    [params] = made
    before = [getattr(params, field.name).clone() for field in fields(params)]
    sampler.warm_up(torch.float32)
    assert all(torch.equal(getattr(params, field.name), was) for field, was in zip(fields(params), before, strict=True))
