"""Hello: what daemons tell each other first, and the check that decides whether they may work together."""

from __future__ import annotations

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import ModelIdentity

MIN_CONTRACT_VERSION = 1
MAX_CONTRACT_VERSION = 3
# From this version on outputs of one request share what they have in common: Submit.shares_with, Open.shares_with.
SHARING_VERSION = 2
# From this version on a scheduler fences all ranks before it claims any, and plans have a section per DP rank.
FENCE_VERSION = 3
# Of any name or fingerprint that a peer sends: it is kept, logged and quoted.
MAX_PEER_NAME_BYTES = 1024


def make_hello(instance_id: str, daemon: str, model: common_pb2.ModelIdentity | None = None) -> common_pb2.Hello:
    """Our side of a stream's first exchange. `model` None: the daemon serves any."""
    return common_pb2.Hello(
        instance_id=instance_id,
        daemon=daemon,
        min_contract_version=MIN_CONTRACT_VERSION,
        max_contract_version=MAX_CONTRACT_VERSION,
        model=model,
    )


def identity_to_proto(
    identity: ModelIdentity,
    *,
    model_fingerprint: str = "",
    tokenizer_fingerprint: str = "",
    grammar_format: str = "",
    sampler_version: int = 0,
) -> common_pb2.ModelIdentity:
    """Description of a model folder, as peers compare it; an empty fingerprint is not compared."""
    return common_pb2.ModelIdentity(
        name=identity.name,
        model_fingerprint=model_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        grammar_format=grammar_format,
        sampler_version=sampler_version,
        vocab_size=identity.vocab_size,
        max_total_len=identity.max_total_len,
        eos_ids=pack_ints(identity.eos_ids),
    )


def check_peer(ours: common_pb2.Hello, theirs: common_pb2.Hello) -> int:
    """Highest contract version that both speak.

    Raises INVALID_ARGUMENT (a long name), MISSING_FIELD (no instance id or versions), VERSION_MISMATCH, MODEL_MISMATCH,
    TOKENIZER_MISMATCH (fingerprint or vocabulary size) or SAMPLER_MISMATCH. What either side leaves empty or 0 is not
    compared.
    """
    _check_complete(theirs)
    version = min(ours.max_contract_version, theirs.max_contract_version)
    if version < max(ours.min_contract_version, theirs.min_contract_version):
        raise _mismatch(
            ErrorReason.ERROR_REASON_VERSION_MISMATCH,
            "contract versions",
            f"{ours.min_contract_version}-{ours.max_contract_version}",
            f"{theirs.min_contract_version}-{theirs.max_contract_version}",
        )
    if ours.HasField("model") and theirs.HasField("model"):
        _check_models(ours.model, theirs.model)
    return version


def check_peer_names(**names: str) -> None:
    """Raises INVALID_ARGUMENT, naming the field, for a name of more than MAX_PEER_NAME_BYTES."""
    for field, name in names.items():
        if len(name) * 4 > MAX_PEER_NAME_BYTES and (size := len(name.encode())) > MAX_PEER_NAME_BYTES:
            message = f"{field} has {size} bytes: send at most {MAX_PEER_NAME_BYTES}"
            metadata = {"field": field, "max": str(MAX_PEER_NAME_BYTES)}
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, metadata)


def check_hello(theirs: common_pb2.Hello, ours: common_pb2.Hello) -> int:
    """check_peer() as the reader of a frame says it: what came, then what it is measured by."""
    return check_peer(ours, theirs)


def _check_complete(hello: common_pb2.Hello) -> None:
    check_peer_names(
        instance_id=hello.instance_id,
        daemon=hello.daemon,
        build=hello.build,
        name=hello.model.name,
        model_fingerprint=hello.model.model_fingerprint,
        tokenizer_fingerprint=hello.model.tokenizer_fingerprint,
        grammar_format=hello.model.grammar_format,
    )
    for field in ("instance_id", "min_contract_version", "max_contract_version"):
        if not getattr(hello, field):
            message = f"hello.{field} is missing: set it"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": f"hello.{field}"})


def _check_models(ours: common_pb2.ModelIdentity, theirs: common_pb2.ModelIdentity) -> None:
    compared = (
        (ErrorReason.ERROR_REASON_MODEL_MISMATCH, "models", ours.model_fingerprint, theirs.model_fingerprint),
        (
            ErrorReason.ERROR_REASON_TOKENIZER_MISMATCH,
            "tokenizers",
            ours.tokenizer_fingerprint,
            theirs.tokenizer_fingerprint,
        ),
        (ErrorReason.ERROR_REASON_TOKENIZER_MISMATCH, "vocabulary sizes", ours.vocab_size, theirs.vocab_size),
        (ErrorReason.ERROR_REASON_SAMPLER_MISMATCH, "samplers", ours.sampler_version, theirs.sampler_version),
    )
    for reason, what, mine, other in compared:
        if mine and other and mine != other:
            raise _mismatch(reason, what, str(mine), str(other))


def _mismatch(reason: ErrorReason, what: str, ours: str, theirs: str) -> MeshError:
    message = f"{what} differ (ours {ours}, theirs {theirs}): run the same release on the same model folder"
    return MeshError(reason, message, {"ours": ours, "theirs": theirs})
