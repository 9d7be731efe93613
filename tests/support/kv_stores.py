"""Stores of KV pages for tests: backends over real servers on this machine, pages whose bytes follow from their key."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixmesh.daemons.worker.kv_store.backend import KvBackend, KvStoreError
from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend
from radixmesh.daemons.worker.kv_store.keys import PageFormat, page_keys
from radixmesh.daemons.worker.kv_store.memory_backend import MemoryBackend
from radixmesh.daemons.worker.kv_store.store import KvStore, Page

FORMAT = PageFormat(weights_digest="w", compute="c", kv_dtype="float32", kv_layout="layers=1;page=4", page_size=4)

_AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


def content(key: bytes, num_bytes: int) -> bytes:
    """The bytes that the page of a key holds in tests: a page under another key, or of another moment, shows."""
    return hashlib.shake_128(key).digest(num_bytes)


def pages_of(chain: int, num: int, num_bytes: int = 1000) -> list[Page]:
    """Pages of one sequence, which chain chooses."""
    ids = np.arange(4 * num, dtype=np.int32) + np.int32(chain * 100_003 % 2**30)
    keys = page_keys(FORMAT.root(), ids, 4)
    return [Page(key, ids[4 * at : 4 * at + 4], memoryview(content(key, num_bytes))) for at, key in enumerate(keys)]


def targets_of(pages: list[Page]) -> list[Page]:
    """Empty memory for the same pages."""
    return [page._replace(payload=memoryview(bytearray(page.payload.nbytes))) for page in pages]


@dataclass(frozen=True, slots=True)
class Medium:
    """A medium as a test finds it. open: another backend on it. records: where its bytes can be changed, one path or
    name for each file or object; damage: changes byte `at` of one of them by `mask`. budget_bytes: None: a server's."""

    open: Callable[[], KvBackend]
    damage: Callable[[KvBackend, bytes, int, int], None]
    budget_bytes: int | None
    is_shared: bool
    outlives_its_process: bool


@contextmanager
def medium(name: str, folder: Path) -> Iterator[Medium]:
    """A fresh medium; pytest skips where its server is not installed."""
    with MEDIA[name](folder) as made:
        yield made


@contextmanager
def _memory(folder: Path) -> Iterator[Medium]:
    def damage(backend: KvBackend, key: bytes, at: int, mask: int) -> None:
        assert isinstance(backend, MemoryBackend)
        record = bytearray(backend.records[key])
        record[at] ^= mask
        backend.records[key] = bytes(record)

    yield Medium(lambda: MemoryBackend(budget_bytes=4 << 20), damage, 4 << 20, False, False)


@contextmanager
def _disk(folder: Path) -> Iterator[Medium]:
    def damage(backend: KvBackend, key: bytes, at: int, mask: int) -> None:
        assert isinstance(backend, DiskBackend)
        place = backend.index[key]
        segment = backend.segments[place >> 32]
        offset, _ = segment.extent(place & 0xFFFFFFFF)
        with segment.path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, offset + at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ mask]), offset + at)

    def open_one() -> DiskBackend:
        return DiskBackend(folder / "kv", budget_bytes=4 << 20, segment_bytes=1 << 20)

    yield Medium(open_one, damage, 4 << 20, False, True)


@contextmanager
def _redis(folder: Path) -> Iterator[Medium]:
    import redis

    from radixmesh.daemons.worker.kv_store.redis_backend import RedisBackend

    def damage(backend: KvBackend, key: bytes, at: int, mask: int) -> None:
        with redis.Redis.from_url(url) as client:
            name = b"radixmesh:kv:" + key
            byte = client.getrange(name, at, at)[0]
            client.setrange(name, at, bytes([byte ^ mask]))

    with redis_server(folder) as url:
        yield Medium(lambda: RedisBackend(url), damage, None, True, True)


@contextmanager
def _s3(folder: Path) -> Iterator[Medium]:
    import boto3

    from radixmesh.daemons.worker.kv_store.s3_backend import S3Backend

    def damage(backend: KvBackend, key: bytes, at: int, mask: int) -> None:
        name = f"pages/{key.hex()}"
        record = bytearray(client.get_object(Bucket="kv-pages", Key=name)["Body"].read())
        record[at] ^= mask
        client.put_object(Bucket="kv-pages", Key=name, Body=bytes(record))

    with s3_server() as url:
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="kv-pages")
        yield Medium(lambda: S3Backend("kv-pages", prefix="pages/", endpoint_url=url), damage, None, True, True)


@contextmanager
def _nixl_file(folder: Path) -> Iterator[Medium]:
    pytest.importorskip("nixl_cu13", reason="nixl-cu13 is not installed: radixmesh[kv-nixl]")
    from radixmesh.daemons.worker.kv_store.nixl_file_backend import NixlFileBackend

    def damage(backend: KvBackend, key: bytes, at: int, mask: int) -> None:
        path = folder / "kv" / key.hex()[:2] / f"{key.hex()}.page"
        record = bytearray(path.read_bytes())
        record[at] ^= mask
        path.write_bytes(record)

    def open_one() -> NixlFileBackend:
        return NixlFileBackend(folder / "kv", budget_bytes=4 << 20, pool_bytes=16 << 20)

    yield Medium(open_one, damage, 4 << 20, True, True)


@contextmanager
def _nixl_obj(folder: Path) -> Iterator[Medium]:
    import boto3

    from radixmesh.daemons.worker.kv_store.nixl_obj_backend import NixlObjBackend

    def damage(backend: KvBackend, key: bytes, at: int, mask: int) -> None:
        name = f"pages/{key.hex()}"
        record = bytearray(client.get_object(Bucket="kv-pages", Key=name)["Body"].read())
        record[at] ^= mask
        client.put_object(Bucket="kv-pages", Key=name, Body=bytes(record))

    def open_one() -> NixlObjBackend:
        return NixlObjBackend("kv-pages", prefix="pages/", endpoint_url=url, pool_bytes=16 << 20)

    needs_nixl_obj()
    with s3_server() as url:
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="kv-pages")
        yield Medium(open_one, damage, None, True, True)


@contextmanager
def _mooncake(folder: Path) -> Iterator[Medium]:
    servers, client = _kept_mooncake()
    from radixmesh.daemons.worker.kv_store.mooncake_backend import MooncakeBackend

    def damage(backend: KvBackend, key: bytes, at: int, mask: int) -> None:
        name = f"radixmesh-kv-{key.hex()}"
        record = bytearray(client.get(name))
        record[at] ^= mask
        assert client.remove(name, True) == 0 and client.put(name, bytes(record)) == 0

    assert client.remove_all(True) >= 0, "pages of an earlier test stay"
    yield Medium(lambda: MooncakeBackend(servers.master, pool_bytes=16 << 20), damage, None, True, True)


@functools.cache
def _kept_mooncake() -> tuple[MooncakeServers, Any]:
    """A store that stays for the process's tests, since it takes seconds to start, and a client of it."""
    servers = MooncakeServers(64, 10_000)
    atexit.register(servers.close)
    servers.start_master()
    servers.start_memory()
    from radixmesh.daemons.worker.kv_store.mooncake_backend import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", servers.master) == 0
    return servers, client


MEDIA: Mapping[str, Callable[[Path], AbstractContextManager[Medium]]] = {
    "memory": _memory,
    "disk": _disk,
    "redis": _redis,
    "s3": _s3,
    "nixl_file": _nixl_file,
    "nixl_obj": _nixl_obj,
    "mooncake": _mooncake,
}
"""Every medium; a test of the contract fails where a `KvBackend` is not among them."""


@contextmanager
def redis_server(folder: Path, *options: str, port: int = 0) -> Iterator[str]:
    """URL of a Redis server of its own, without persistence. port: 0: any that is free."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    with socket.create_server(("127.0.0.1", port)) as listener:
        port = listener.getsockname()[1]
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir"]
    process = subprocess.Popen([*command, str(folder), *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the Redis server does not start"
                time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3_server() -> Iterator[str]:
    """URL of moto's S3 server in this process: a real server over HTTP, whose objects are in memory."""
    from moto.core.models import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _AWS.items():
                patch.setenv(name, value)
            host, port = server.get_host_and_port()
            yield f"http://{host}:{port}"
    finally:
        server.stop()
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()


SHARED = ("redis", "nixl-file", "nixl-obj", "mooncake")
"""Schemes of stores that replicas share, as tests and benches start them."""


@contextmanager
def shared_store(scheme: str, folder: Path) -> Iterator[str]:
    """URL of a store of its own that several workers may open; pytest skips where it cannot be had."""
    if scheme == "redis":
        with redis_server(folder) as url:
            yield url
    elif scheme == "nixl-file":
        pytest.importorskip("nixl_cu13", reason="nixl-cu13 is not installed: radixmesh[kv-nixl]")
        yield f"nixl-file://{folder}/shared?budget=16GiB"
    elif scheme == "nixl-obj":
        needs_nixl_obj()
        import boto3

        with s3_server() as url:
            boto3.client("s3", endpoint_url=url).create_bucket(Bucket="kv-pages")
            yield f"nixl-obj://kv-pages?endpoint={url}&pool=64MiB"
    else:
        assert scheme == "mooncake", scheme
        with mooncake_store(segment_mib=512) as servers:
            yield f"mooncake://{servers.master}?pool=64MiB"


def needs_nixl_obj() -> None:
    """Skips where NIXL has no object plugin that can be loaded."""
    api = pytest.importorskip("nixl_cu13._api", reason="nixl-cu13 is not installed: radixmesh[kv-nixl]")
    agent = api.nixl_agent("probe", api.nixl_agent_config(backends=[]))
    if not agent.get_plugin_mem_types("OBJ"):
        pytest.skip(
            "this NIXL's plugin OBJ cannot be loaded: 1.5 and later need libcuobjclient (nixl-cu13<1.5 does not)"
        )


class MooncakeServers:
    """A master, and a process that gives the store its memory: pages outlive workers, not these."""

    def __init__(self, segment_mib: int, lease_ms: int) -> None:
        found = importlib.util.find_spec("mooncake")
        if found is None or not found.submodule_search_locations:
            pytest.skip("no Mooncake here: radixmesh[kv-mooncake]")
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            pytest.skip(f"Mooncake cannot be loaded ({error}; Debian: apt-get install libibverbs1)")
        self._programs = Path(found.submodule_search_locations[0])
        self._segment_mib, self._lease_ms = segment_mib, lease_ms
        self._ports = [_free_port() for _ in range(3)]
        self.master = f"127.0.0.1:{self._ports[0]}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_master(self) -> None:
        options = [f"--rpc_port={self._ports[0]}", f"--metrics_port={self._ports[1]}", "--metrics_host=127.0.0.1"]
        lease = f"--default_kv_lease_ttl={self._lease_ms}"
        # Memory of a client that is gone is forgotten after so many seconds.
        self._start("mooncake_master", *options, "--rpc_address=127.0.0.1", lease, "--client_ttl=3")
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._ports[0]), 1).close()
                return
            except OSError:
                assert self.process("mooncake_master").poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def start_memory(self) -> None:
        """Gives memory to the store, and waits until it takes a page."""
        from radixmesh.daemons.worker.kv_store.mooncake_backend import MooncakeBackend

        self._start(
            "mooncake_client",
            f"--global_segment_size={self._segment_mib} MB",
            f"--master_server_address={self.master}",
            "--metadata_server=P2PHANDSHAKE",
            "--host=127.0.0.1",
            f"--port={self._ports[2]}",
        )
        store, deadline = KvStore(MooncakeBackend(self.master, pool_bytes=1 << 20)), time.monotonic() + 30
        page = pages_of(987_654, 1, 100)
        while True:
            try:
                store.put(page).result(30)
                break
            except KvStoreError:
                assert time.monotonic() < deadline, "the Mooncake store takes no page"
                time.sleep(0.05)
        store.remove([page[0].key]).result(30)
        store.close()

    def process(self, name: str) -> subprocess.Popen[bytes]:
        return self._processes[name]

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    def _start(self, name: str, *options: str) -> None:
        program = str(self._programs / name)
        self._processes[name] = subprocess.Popen(
            [program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


@contextmanager
def mooncake_store(*, segment_mib: int = 64, lease_ms: int = 10_000) -> Iterator[MooncakeServers]:
    """A Mooncake store of this machine, over TCP."""
    servers = MooncakeServers(segment_mib, lease_ms)
    try:
        servers.start_master()
        servers.start_memory()
        yield servers
    finally:
        servers.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
