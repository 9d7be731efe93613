"""generation_config.json: defaults of requests that set nothing, read with bounds, left alone by flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.router_mesh import MODEL

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.messages import identity_from_proto, resolved_to_proto
from radixmesh.daemons.router.requests.intake.resolver import check_request, resolve
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import read_model_identity
from radixmesh.daemons.runtime.model_folder.generation_config import read_sampling_defaults
from radixmesh.daemons.worker.backends import load_model
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.router.v1 import router_pb2

PUBLISHED = {
    "do_sample": True,
    "eos_token_id": [3, 7],
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.75,
    "min_p": 0.125,
    "repetition_penalty": 1.25,
    "transformers_version": "4.57.0",
}


def folder_of(tmp_path: Path, content: object) -> Path:
    tmp_path.mkdir(exist_ok=True)
    config = {"vocab_size": 1024, "max_position_embeddings": 512, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def sampling_of(
    sampling: common_pb2.SamplingParams, defaults: common_pb2.SamplingDefaults
) -> common_pb2.SamplingParams:
    message = common_pb2.ModelIdentity()
    message.CopyFrom(MODEL)
    message.default_sampling.CopyFrom(defaults)
    identity = identity_from_proto(message)
    request = router_pb2.GenerateRequest(prompt_ids=pack_ints([1]), sampling=sampling)
    draft = check_request(request)
    resolved = resolve(request, draft, request_id="r", prompt_ids=request.prompt_ids, identity=identity)
    assert identity_from_proto(resolved_to_proto(resolved).model_identity) == identity
    return resolved_to_proto(resolved).sampling


def test_all_fields_are_read_and_fill_what_a_request_leaves_open(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(folder_of(tmp_path, PUBLISHED))
    filled = sampling_of(common_pb2.SamplingParams(), defaults)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert getattr(filled, name) == PUBLISHED[name], name
    assert read_model_identity(tmp_path).eos_ids == (3, 7)


def test_whatever_a_request_sets_goes_before(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(folder_of(tmp_path, PUBLISHED))
    wanted = common_pb2.SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=5)
    assert [f.name for f, _ in wanted.ListFields()] == [
        "repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed"
    ]  # fmt: skip
    filled = sampling_of(wanted, defaults)
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p, filled.repetition_penalty) == (0, 0, 1, 0, 1)


def test_without_a_file_the_contracts_defaults_hold(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {})
    assert not read_sampling_defaults(folder).ListFields()
    (folder / "generation_config.json").unlink()
    defaults = read_sampling_defaults(folder)
    assert not defaults.ListFields()
    filled = sampling_of(common_pb2.SamplingParams(), defaults)
    assert (filled.temperature, filled.top_k, filled.top_p, filled.repetition_penalty) == (1, 0, 1, 1)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-1", '"0.5"', "true", "[]", "{}", "1e400", "9" * 400, "null", "2000000000000"]
)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "top_k"])
def test_a_value_out_of_range_is_left_out(tmp_path: Path, name: str, value: str) -> None:
    content = f'{{"{name}": {value}, "temperature": 0.5}}' if name != "temperature" else f'{{"temperature": {value}}}'
    defaults = read_sampling_defaults(folder_of(tmp_path, content))
    if (name, value) == ("top_k", "-1"):
        assert defaults.HasField("top_k") and defaults.top_k == 0, "all, as in the files of some"
    else:
        assert not defaults.HasField(name)  # type: ignore[arg-type]
    assert name == "temperature" or defaults.temperature == 0.5
    sampling_of(common_pb2.SamplingParams(), defaults)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '{"x": "' + "y" * (1 << 20) + '"}'])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(MeshError) as raised:
        read_sampling_defaults(folder_of(tmp_path, content))
    assert raised.value.reason_name == "BAD_CHECKPOINT" and "generation_config.json" in raised.value.message


@pytest.mark.parametrize("eos", [list(range(257)), [1 << 31], [-1], ["a"] * 10])
def test_eos_ids_are_bounded(tmp_path: Path, eos: object) -> None:
    with pytest.raises(MeshError) as raised:
        read_model_identity(folder_of(tmp_path, {"eos_token_id": eos}))
    assert raised.value.reason_name == "BAD_CHECKPOINT" and len(raised.value.message) < 1000


@pytest.mark.parametrize("is_read", [True, False])
def test_a_worker_announces_them_unless_told_not_to(tmp_path: Path, is_read: bool) -> None:
    folder = folder_of(tmp_path / "tuned", PUBLISHED)
    settings = WorkerSettings(backend=Backend.SIMULATED, model=folder, generation_config=is_read, num_pages=64)
    identity = load_model(settings).identity
    assert identity.HasField("default_sampling") is is_read
    assert not is_read or identity.default_sampling.top_k == 20
