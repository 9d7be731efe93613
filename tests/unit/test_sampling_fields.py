"""Every sampling parameter arrives: over the wire, from HTTP, and at the sampler of the CPU."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from support.sampling_fields import ALL, CHANGED, LOGPROBS, changed

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.http.bodies.body import read_object
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.native_request import NativeRequest, NativeSampling
from radixmesh.daemons.router.http.request_types.options import TokenOptions
from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.sampling import Sampling, sampling_from_proto, sampling_to_proto
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.sampler import sample_tokens

NATIVE = {"seed": "sampling_seed"}


def test_every_field_has_a_value_here() -> None:
    assert set(CHANGED) == set(ALL)


@pytest.mark.parametrize("field", ALL)
def test_a_field_survives_the_wire(field: str) -> None:
    sampling = changed(field)
    message = common_pb2.SamplingParams.FromString(sampling_to_proto(sampling).SerializeToString())
    assert sampling_from_proto(message) == sampling


@pytest.mark.parametrize("field", ALL)
def test_a_field_survives_the_wire_beside_any_seed(field: str) -> None:
    """Options are remembered without their seed, and get it back."""
    for seed in (7, 2**64 - 1, 0):
        sampling = replace(changed(field), seed=seed)
        assert sampling_from_proto(sampling_to_proto(sampling)) == sampling


def _in_json(field: str) -> object:
    value = CHANGED[field]
    return {str(token): bias for token, bias in value} if isinstance(value, tuple) else value


@pytest.mark.parametrize("field", [field for field in ALL if field not in LOGPROBS])
def test_a_field_comes_from_both_forms_of_http(field: str) -> None:
    native = {"text": "a", "sampling_params": {NATIVE.get(field, field): _in_json(field)}}
    for kind, body in ((NativeRequest, native), (CompletionRequest, {"prompt": "a", field: _in_json(field)})):
        read = read_object(json.dumps(body).encode(), kind, "").settled()
        (request,) = read.to_messages({})
        assert sampling_from_proto(request.sampling) == changed(field), kind.__name__


def test_the_native_form_passes_on_all_options_of_tokens() -> None:
    """Also those that are no sampling parameters: `_SHARED` names them one by one."""
    values = {field.name: object() for field in fields(TokenOptions) if field.name not in TokenOptions.OWN_FIELDS}
    options = NativeSampling(**values).to_options()  # type: ignore[arg-type]
    assert {name: getattr(options, name) for name in values} == values


@pytest.mark.parametrize("field", [field for field in ALL if field not in LOGPROBS])
def test_a_field_changes_what_a_cpu_samples(field: str) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(0, 1, (400, 12)).astype(np.float32)

    def sampled(sampling: Sampling) -> list[int]:
        inputs = [
            SampleInput(sampling=sampling, prompt_ids=as_ints([1, 2]), output_ids=as_ints([4, 4, 5]), position=at)
            for at in range(len(rows))
        ]
        return sample_tokens(rows, inputs)

    assert sampled(changed(field)) != sampled(Sampling())
