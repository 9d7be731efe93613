"""This process's agent of NIXL, and the memory that is registered with it.

The library is imported here, on demand alone. It comes with a UCX of its own, which takes what a machine has: RDMA,
GPU to GPU, copies between processes of one host, TCP. An agent needs no GPU.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.kv_transfer.device_memory import Pieces
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray

_ALIGNMENT = 64
# Agents of peers that are known at a time: each was a connection once.
_MAX_PEERS = 1024
_MAX_NOTICES = 1 << 16


class NixlAgent:
    """Safe to be called by several threads. Raises UNSUPPORTED where the library is not there or finds no back end."""

    def __init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        try:
            import nixl_cu13._api as api

            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"], sync_mode=strict)
            self._agent = api.nixl_agent(f"radixmesh-{secrets.token_hex(8)}", config)
        except (ImportError, RuntimeError) as error:
            message = f"NIXL cannot be had here ({error}): install radixmesh[nixl], or choose another transport"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "nixl"}) from error
        self._peers: dict[bytes, str] = {}
        self._notices: dict[bytes, None] = {}
        self._lock = threading.Lock()

    @property
    def metadata(self) -> bytes:
        """By which a peer reaches this agent and what is registered so far."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, num_bytes: int, device: int) -> object:
        """Memory that transfers may read and write; device: -1 = the host's, or a GPU's number. Give the answer to
        deregister()."""
        kind = "DRAM" if device < 0 else "VRAM"
        return self._agent.register_memory([(address, num_bytes, max(device, 0), "")], kind)

    def deregister(self, registered: object) -> None:
        """Its memory is not read or written by own transfers any more. No word about those of peers: copies between
        processes and over TCP come all the same."""
        self._agent.deregister_memory(registered)

    def connect(self, metadata: bytes) -> str:
        """Name of a peer, for transfers to it. Raises TRANSFER_FAILED."""
        with self._lock:
            if metadata not in self._peers:
                while len(self._peers) >= _MAX_PEERS:
                    self._forget(next(iter(self._peers)))
                try:
                    self._peers[metadata] = _text(self._agent.add_remote_agent(metadata))
                except Exception as error:
                    raise _failed(f"there is no way to the peer over NIXL: {error}") from error
            return self._peers[metadata]

    def disconnect(self, metadata: bytes) -> None:
        """Forgets a peer that a transfer failed to: the next one connects anew."""
        with self._lock:
            if metadata in self._peers:
                self._forget(metadata)

    def post_write(self, peer: str, source: tuple[int, int, int], target: tuple[int, int, int]) -> object:
        """Begins to write memory (address, bytes, device) to a peer's; the answer is for state(). May block for as
        long as the copy takes. Raises TRANSFER_FAILED."""
        agent = self._agent
        try:
            ends = [
                agent.get_xfer_descs([(address, num_bytes, max(device, 0))], "DRAM" if device < 0 else "VRAM")
                for address, num_bytes, device in (source, target)
            ]
            handle: object = agent.initialize_xfer("WRITE", *ends, peer)
            agent.transfer(handle)
        except Exception as error:
            raise _failed(f"KV could not be written over NIXL: {error}") from error
        return handle

    def state(self, handle: object) -> str:
        """DONE, PROC while it is on its way, or ERR."""
        try:
            return str(self._agent.check_xfer_state(handle))
        except Exception:
            return "ERR"

    def release(self, handle: object) -> None:
        """A handle whose state is final."""
        self._agent.release_xfer_handle(handle)

    def notify(self, peer: str, notice: bytes) -> None:
        """Tells a peer's take_notice(), behind what was written. One that is gone is fine."""
        try:
            self._agent.send_notif(peer, notice)
        except Exception:
            return

    def take_notice(self, notice: bytes) -> bool:
        """True once, if a peer has sent that notice."""
        with self._lock:
            for notices in self._agent.get_new_notifs().values():
                self._notices.update(dict.fromkeys(map(bytes, notices)))
            while len(self._notices) > _MAX_NOTICES:
                del self._notices[next(iter(self._notices))]
            if notice not in self._notices:
                return False
            del self._notices[notice]
            return True

    def _forget(self, metadata: bytes) -> None:
        name = self._peers.pop(metadata)
        try:
            self._agent.remove_remote_agent(name)
        except Exception:
            return


class Slab:
    """Host memory that is registered once, as a whole, and lent in pieces: a transfer's piece is one descriptor."""

    def __init__(self, agent: NixlAgent, num_bytes: int) -> None:
        # Room for what each piece is rounded up by.
        self.num_bytes = num_bytes + (num_bytes >> 6) + (1 << 20)
        self._memory: ByteArray = np.frombuffer(mmap.mmap(-1, self.num_bytes), np.uint8)
        self.address = self._memory.ctypes.data
        self._registered = agent.register(self.address, self.num_bytes, -1)
        self._pieces = Pieces(self.num_bytes, _ALIGNMENT)

    @property
    def num_free(self) -> int:
        """Bytes that nobody has."""
        return self._pieces.num_free

    def take(self, num_bytes: int) -> ByteArray:
        """A piece; not cleared. Raises MemoryError, also where the free bytes do not lie together."""
        start = self._pieces.take(num_bytes)
        return self._memory[start : start + num_bytes]

    def give_back(self, piece: ByteArray) -> None:
        """Nobody reads or writes it any more."""
        self._pieces.give_back(piece.ctypes.data - self.address, len(piece))

    def has(self, array: ByteArray) -> bool:
        """True for a part of a piece."""
        start = array.ctypes.data - self.address
        return start >= 0 and start + len(array) <= self.num_bytes


def _text(name: bytes | str) -> str:
    return name if isinstance(name, str) else name.decode()


def _failed(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message)
