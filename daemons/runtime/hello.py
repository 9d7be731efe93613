"""The first message of every stream: who is there, what it speaks, what it serves."""

from __future__ import annotations

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason

from .errors import MeshError

# The contract versions that this code speaks.
MIN_CONTRACT_VERSION = 1
MAX_CONTRACT_VERSION = 1


def make_hello(daemon: str, instance_id: str, model: common_pb2.ModelIdentity | None = None) -> common_pb2.Hello:
    """Our own Hello. model: None where the sender serves any."""
    return common_pb2.Hello(
        instance_id=instance_id,
        daemon=daemon,
        min_contract_version=MIN_CONTRACT_VERSION,
        max_contract_version=MAX_CONTRACT_VERSION,
        model=model,
    )


def check_hello(theirs: common_pb2.Hello, ours: common_pb2.Hello) -> int:
    """The contract version that both speak, the highest. What one side leaves empty is not compared.

    Raises MeshError MISSING_FIELD, INVALID_ARGUMENT, VERSION_MISMATCH, MODEL_MISMATCH, TOKENIZER_MISMATCH or
    SAMPLER_MISMATCH.
    """
    if not theirs.instance_id:
        raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, "set hello.instance_id", {"field": "hello.instance_id"})
    version = _common_version(theirs, ours)
    for field, reason in (
        ("tokenizer_fingerprint", ErrorReason.ERROR_REASON_TOKENIZER_MISMATCH),
        ("model_fingerprint", ErrorReason.ERROR_REASON_MODEL_MISMATCH),
        ("sampler_version", ErrorReason.ERROR_REASON_SAMPLER_MISMATCH),
    ):
        their_value, our_value = getattr(theirs.model, field), getattr(ours.model, field)
        if their_value and our_value and their_value != our_value:
            message = f"{field} of {theirs.daemon or 'the peer'} and {ours.daemon} differ: start both on one model"
            raise MeshError(reason, message, {"ours": str(our_value), "theirs": str(their_value)})
    return version


def _common_version(theirs: common_pb2.Hello, ours: common_pb2.Hello) -> int:
    low, high = theirs.min_contract_version, theirs.max_contract_version
    if not 1 <= low <= high:
        message = f"contract versions {low} to {high} are no range: send 1 <= min_contract_version <= max"
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "hello.min_contract_version", "min": "1"}
        )
    version = min(high, ours.max_contract_version)
    if version < max(low, ours.min_contract_version):
        our_range = f"{ours.min_contract_version}-{ours.max_contract_version}"
        message = f"{ours.daemon} speaks contract versions {our_range}, the peer {low}-{high}: upgrade one of them"
        raise MeshError(
            ErrorReason.ERROR_REASON_VERSION_MISMATCH, message, {"ours": our_range, "theirs": f"{low}-{high}"}
        )
    return version
