"""Destination of KV that a prefill sends, as a router carries it from the decode side to the prefill side."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.scheduler.v1 import scheduler_pb2

MAX_TRANSFER_ID_BYTES = 64
MAX_RANKS = 256
MAX_REGION_BYTES = 16 << 10
_MAX_ADDRESS_BYTES = 1024
_MAX_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTarget:
    """KV of tokens [first_token, first_token + num_tokens) is wanted there.

    regions, addresses: of each rank of the receiving group. tokens_digest: see digest_of(). One without regions is not
    known yet, but for its id: the rest follows.
    """

    transfer_id: str
    regions: tuple[bytes, ...]
    addresses: tuple[str, ...]
    first_token: int
    num_tokens: int
    tokens_digest: bytes

    @property
    def is_known(self) -> bool:
        """False: only its id is."""
        return bool(self.regions)

    @property
    def end(self) -> int:
        """Position behind the last token that is wanted."""
        return self.first_token + self.num_tokens

    @classmethod
    def from_proto(cls, message: scheduler_pb2.TransferTarget) -> KvTarget:
        """Raises INVALID_ARGUMENT, naming the field."""
        is_bare = message == scheduler_pb2.TransferTarget(transfer_id=message.transfer_id)
        sizes = {
            "transfer_id": 0 < len(message.transfer_id.encode()) <= MAX_TRANSFER_ID_BYTES,
            "regions": 0 < len(message.regions) <= MAX_RANKS and max(map(len, message.regions)) <= MAX_REGION_BYTES,
            "addresses": len(message.addresses) == len(message.regions)
            and all(0 < len(address.encode()) <= _MAX_ADDRESS_BYTES for address in message.addresses),
            "num_tokens": 0 < message.num_tokens <= _MAX_TOKENS and message.first_token <= _MAX_TOKENS,
            "tokens_digest": len(message.tokens_digest) == hashlib.sha256().digest_size,
        }
        for name, is_right in sizes.items():
            if not is_right and (name == "transfer_id" or not is_bare):
                text = f"send_kv_to.{name} is none that a reservation was answered with: send the answer as it came"
                raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, text, {"field": f"send_kv_to.{name}"})
        return cls(
            transfer_id=message.transfer_id,
            regions=tuple(message.regions),
            addresses=tuple(message.addresses),
            first_token=message.first_token,
            num_tokens=message.num_tokens,
            tokens_digest=message.tokens_digest,
        )

    def to_proto(self) -> scheduler_pb2.TransferTarget:
        """The same as a message."""
        return scheduler_pb2.TransferTarget(
            transfer_id=self.transfer_id,
            regions=self.regions,
            addresses=self.addresses,
            first_token=self.first_token,
            num_tokens=self.num_tokens,
            tokens_digest=self.tokens_digest,
        )


def digest_of(cache_name: str, ids: IntArray) -> bytes:
    """32 bytes that both sides compare: KV is sent only for the tokens, and the cache, that it was reserved for."""
    return hashlib.sha256(cache_name.encode() + b"\0" + pack_ints(ids)).digest()
