"""Pages in a Mooncake store (`pip install radixmesh[kv-mooncake]`), whose memory is that of all hosts that join it.

A master (`mooncake_master`) knows which page lies where, evicts the least recently used, and knows nothing after it was
killed: its pages are misses then. Memory is given by workers (`segment`), whose pages are gone when they end, or by
`mooncake_client` processes, whose pages outlive them. Pages travel from and to registered memory, over TCP or RDMA.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_store.backend import (
    KvBackend,
    KvStoreError,
    ReadResult,
    ReadTarget,
    StoredPage,
    StoreFailure,
    Usage,
)
from radixmesh.daemons.worker.kv_store.batches import groups
from radixmesh.daemons.worker.kv_store.listeners import limit_new, open_listeners, own_addresses
from radixmesh.daemons.worker.kv_store.registered_memory import Lane, LanePool, aligned

# Of the library, which reads them when it is imported. Calls to a master that does not answer end after 2 s.
_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    # It logs each page that is not there as an error.
    "MC_LOG_LEVEL": "ERROR",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
try:
    from mooncake.store import MooncakeDistributedStore
except ImportError as error:
    raise KvStoreError(
        StoreFailure.SETTINGS,
        f"pages in a Mooncake store need its library ({error}): pip install 'radixmesh[kv-mooncake]', and"
        " libibverbs.so.1 of the system (Debian: apt-get install libibverbs1)",
    ) from error

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore as Client

_log = get_logger(__name__)

PROTOCOLS = ("tcp", "rdma")
# Of the library's ErrorCode.
_NO_ROOM, _WRONG_SIZE = -200, -600
# Not there, being written, or moved while it was read: -703, -704, -707; its host does not answer: -800.
_ABSENT, _NOT_MOVED = frozenset((-703, -704, -707)), -800
# A batch is one message to the master.
_MAX_PAGES = 256
_MAX_NAMES = 1024
# The master makes room beside its calls: it evicts when a store is nine tenths full, or a page found no room.
_EVICTION_S = (0.02, 0.5)
_PROBE_S = 1.0
# More than the head of a call has.
_NO_CALL_BYTES = 256


class MooncakeBackend(KvBackend):
    """master: HOST:PORT. metadata: how clients find each other, P2PHANDSHAKE or a server's URL. protocol: tcp, or rdma
    with `devices`. host: by which other hosts reach this one; None: the address that the master is reached from.
    segment_bytes: memory that this process gives to the store. pool_bytes: of registered memory; a record takes at most
    a quarter. timeout_s: of a group of at most 256 pages.

    A master that is not there yet is tried again by each call. Raises KvStoreError SETTINGS.
    """

    is_shared = True

    def __init__(
        self,
        master: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        host: str | None = None,
        segment_bytes: int = 0,
        pool_bytes: int = 256 << 20,
        timeout_s: float = 5.0,
    ) -> None:
        self._master, self._metadata, self._host = master, metadata, host
        self._protocol, self._devices, self._segment_bytes = protocol, devices, segment_bytes
        self._lanes = LanePool(pool_bytes, name=f"the Mooncake store of {master}", timeout_s=timeout_s)
        self._connecting = threading.Lock()
        self._client: Client | None = None
        self._written = 0
        try:
            # Here it holds up nothing that it has the interpreter's lock meanwhile.
            self._connected()
        except KvStoreError as error:
            _log.warning("kv_store_not_connected", error=str(error))

    def write(self, pages: Sequence[StoredPage]) -> int:
        client, most = self._connected(), self._lanes.lane_bytes
        for page in pages:
            if aligned(page.num_bytes) > most:
                message = f"a page of {page.num_bytes} bytes is larger than {most}, a quarter of the pool: give it more"
                raise KvStoreError(StoreFailure.TOO_LARGE, message)
        # Their store has asked for those that are there; what another has written meanwhile counts as written.
        for group in groups(pages, lambda page: aligned(page.num_bytes), max_bytes=most, max_items=_MAX_PAGES):
            with self._lanes.lane() as lane:
                places = lane.fill(group)
                names = [_name_of(page.key) for page in group]
                lane.run(lambda lane=lane, names=names, places=places: _put(client, lane, names, places))  # type: ignore[misc]
            self._written += sum(page.num_bytes for page in group)
        return len(pages)

    def read(self, targets: Sequence[ReadTarget]) -> list[ReadResult]:
        client, most = self._connected(), self._lanes.lane_bytes
        results: list[ReadResult] = []
        for group in groups(targets, lambda target: aligned(target.num_bytes), max_bytes=most, max_items=_MAX_PAGES):
            if aligned(group[0].num_bytes) > most:
                results.append(ReadResult.ABSENT)  # Of a store with a larger pool.
                continue
            with self._lanes.lane() as lane:
                places = lane.places([target.num_bytes for target in group])
                names = [_name_of(target.key) for target in group]
                found = lane.run(lambda lane=lane, names=names, places=places: _get(client, lane, names, places))  # type: ignore[misc]
                for target, (offset, _), result in zip(group, places, found, strict=True):
                    if result is ReadResult.READ:
                        lane.copy_out(target, offset)
            results += found
        return results

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        client = self._connected()
        found: list[bool] = []
        for names in _parts(keys):
            with self._lanes.lane() as lane:
                codes = lane.run(lambda names=names: client.batch_is_exist(names))  # type: ignore[misc]
            if min(codes) < 0:
                raise _unavailable(min(codes))
            found += [code == 1 for code in codes]
        return found

    def remove(self, keys: Sequence[bytes]) -> None:
        client = self._connected()
        for names in _parts(keys):
            with self._lanes.lane() as lane:
                # By force: readers keep a page for seconds otherwise. Who reads it now finds a wrong checksum.
                codes = lane.run(lambda names=names: client.batch_remove(names, True))  # type: ignore[misc]
            if bad := [code for code in codes if code and code not in _ABSENT]:
                raise _unavailable(bad[0])

    def usage(self) -> Usage:
        return Usage(written_bytes=self._written)

    def close(self) -> None:
        # A client that is closed under a call crashes the process.
        if self._lanes.close() and self._client is not None:
            self._client.close()
        self._client = None

    def _connected(self) -> Client:
        with self._connecting:
            if self._client is not None:
                return self._client
            host, port = self._master.rsplit(":", 1)
            # The library's own attempts hold the interpreter's lock, for seconds where no master answers.
            try:
                with socket.create_connection((host.strip("[]"), int(port)), _PROBE_S) as probe:
                    reached_from = str(probe.getsockname()[0])
                    _await_sign(probe)
            except OSError as error:
                message = f"there is no Mooncake master at {self._master} ({error}): start one, or look after it"
                raise KvStoreError(StoreFailure.UNAVAILABLE, message) from error
            client = MooncakeDistributedStore()
            own = self._host or reached_from
            code = self._set_up(client, own, own_addresses(own) or [reached_from])
            memory = self._lanes.memory
            if code or (code := client.register_buffer(memory.ctypes.data, memory.nbytes)):
                message = (
                    f"the Mooncake store of {self._master} cannot be joined (code {code}): look at the master's log"
                )
                raise KvStoreError(StoreFailure.UNAVAILABLE, message)
            self._client = client
            return client

    def _set_up(self, client: Client, own: str, addresses: Sequence[str]) -> int:
        """Joins the store as `own`, and has the library listen on these addresses alone; its code."""
        before = open_listeners()
        code: int = client.setup(
            own, self._metadata, self._segment_bytes, 0, self._protocol, self._devices, self._master
        )
        try:
            ports = limit_new(before, addresses)
        except OSError as error:
            _log.warning("kv_store_listens_everywhere", error=str(error))
        else:
            _log.info("kv_store_listens", addresses=list(addresses), ports=ports)
        return code


def _await_sign(probe: socket.socket) -> None:
    """Returns when a server lives: it hangs up on what is no call, or says something. Raises TimeoutError."""
    probe.sendall(bytes(_NO_CALL_BYTES))
    with suppress(ConnectionError):
        probe.recv(1)


def _put(client: Client, lane: Lane, names: Sequence[str], places: Sequence[tuple[int, int]]) -> None:
    left, pause = list(zip(names, places, strict=True)), _EVICTION_S[0]
    ends = time.monotonic() + _EVICTION_S[1]
    while True:
        codes = client.batch_put_from(
            [name for name, _ in left], [lane.address + at for _, (at, _) in left], [size for _, (_, size) in left]
        )
        if bad := [code for code in codes if code not in (0, _NO_ROOM)]:
            raise _unavailable(bad[0])
        left = [each for each, code in zip(left, codes, strict=True) if code]
        if not left:
            return
        if time.monotonic() > ends:
            message = f"the Mooncake store is full: {len(left)} pages found no room; give it more memory"
            raise KvStoreError(StoreFailure.FULL, message)
        time.sleep(pause)
        pause *= 2


def _get(client: Client, lane: Lane, names: Sequence[str], places: Sequence[tuple[int, int]]) -> list[ReadResult]:
    codes: dict[int, int] = {}
    while len(codes) < len(names):
        # Of a name that is there twice in a batch, the library fills one place and says that it filled both.
        part = list({name: at for at, name in enumerate(names) if at not in codes}.values())
        found = client.batch_get_into(
            [names[at] for at in part], [lane.address + places[at][0] for at in part], [places[at][1] for at in part]
        )
        codes.update(zip(part, found, strict=True))
    # If some came, a host that is gone had the others: the master forgets them in seconds.
    if set(codes.values()) == {_NOT_MOVED}:
        raise _unavailable(_NOT_MOVED)
    return [_result(codes[at], size) for at, (_, size) in enumerate(places)]


def _result(code: int, size: int) -> ReadResult:
    if code == size:
        return ReadResult.READ
    if code >= 0 or code == _WRONG_SIZE:
        return ReadResult.DAMAGED
    if code in _ABSENT or code == _NOT_MOVED:
        return ReadResult.ABSENT
    raise _unavailable(code)


def _unavailable(code: int) -> KvStoreError:
    message = f"the Mooncake store does not do what it is asked (code {code}): look after the master and its clients"
    return KvStoreError(StoreFailure.UNAVAILABLE, message)


def _name_of(key: bytes) -> str:
    return f"radixmesh-kv-{key.hex()}"


def _parts(keys: Sequence[bytes]) -> list[list[str]]:
    return [[_name_of(key) for key in keys[at : at + _MAX_NAMES]] for at in range(0, len(keys), _MAX_NAMES)]
