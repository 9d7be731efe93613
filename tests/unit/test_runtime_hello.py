"""Compatibility of daemons, by their hellos."""

import pytest

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import ModelIdentity
from radixmesh.daemons.runtime.rpc.hello import (
    MAX_CONTRACT_VERSION,
    MIN_CONTRACT_VERSION,
    check_peer,
    identity_to_proto,
    make_hello,
)


def _hello(**changes):
    identity = identity_to_proto(
        ModelIdentity(name="m", vocab_size=100, max_total_len=64, eos_ids=(1, 2)),
        model_fingerprint="aa",
        tokenizer_fingerprint="bb",
        sampler_version=1,
    )
    for name, value in changes.items():
        setattr(identity, name, value)
    return make_hello("i", "worker", identity)


def test_equal_peers_agree_on_the_highest_version():
    ours, theirs = _hello(), _hello()
    ours.max_contract_version, theirs.max_contract_version = 3, 2
    assert check_peer(ours, theirs) == 2


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model_fingerprint", "cc", "MODEL_MISMATCH"),
        ("tokenizer_fingerprint", "cc", "TOKENIZER_MISMATCH"),
        ("vocab_size", 101, "TOKENIZER_MISMATCH"),
        ("sampler_version", 2, "SAMPLER_MISMATCH"),
    ],
)
def test_a_difference_is_named(field, value, reason):
    with pytest.raises(MeshError) as caught:
        check_peer(_hello(), _hello(**{field: value}))
    assert caught.value.reason_name == reason
    assert caught.value.metadata["theirs"] == str(value)


@pytest.mark.parametrize("field", ["model_fingerprint", "tokenizer_fingerprint", "vocab_size", "sampler_version"])
def test_what_a_peer_leaves_open_is_not_compared(field):
    empty = type(getattr(_hello().model, field))()
    assert check_peer(_hello(), _hello(**{field: empty})) == MAX_CONTRACT_VERSION
    assert check_peer(_hello(), make_hello("i", "router")) == MAX_CONTRACT_VERSION


def test_no_common_version_is_refused():
    theirs = _hello()
    theirs.min_contract_version, theirs.max_contract_version = 8, 9
    with pytest.raises(MeshError) as caught:
        check_peer(_hello(), theirs)
    assert caught.value.reason_name == "VERSION_MISMATCH"
    assert caught.value.metadata == {"ours": f"{MIN_CONTRACT_VERSION}-{MAX_CONTRACT_VERSION}", "theirs": "8-9"}


def test_an_empty_hello_is_refused():
    with pytest.raises(MeshError) as caught:
        check_peer(_hello(), common_pb2.Hello())
    assert caught.value.reason_name == "MISSING_FIELD"
