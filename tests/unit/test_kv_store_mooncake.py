"""Pages in a Mooncake store with real servers: a master that is killed, memory that is full, evicted, or gone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("xxhash")
from support.kv_stores import content, mooncake_store, pages_of, targets_of

from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.listeners import open_listeners
from radixmesh.daemons.worker.kv_store.opening import open_backend
from radixmesh.daemons.worker.kv_store.store import Got, KvStore, Page

MASTER, MEMORY = "mooncake_master", "mooncake_client"


def get(store: KvStore, pages: list[Page]) -> list[Got]:
    wanted = targets_of(pages)
    got = store.get(wanted).result(60)
    for page, one in zip(wanted, got, strict=True):
        assert one is not Got.HIT or bytes(page.payload) == content(page.key, page.payload.nbytes)
    return got


class Clock:
    """Time of a store's back-off."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def put_until_there(store: KvStore, pages: list[Page], clock: Clock) -> None:
    """Puts pages again and again, as a tier does, until the store is back and has them."""
    deadline = time.monotonic() + 60
    while True:
        clock.now += 100
        try:
            store.put(pages).result(60)
            if get(store, pages) == [Got.HIT] * len(pages):
                return
        except KvStoreError:
            pass
        assert time.monotonic() < deadline, "the store does not come back"
        time.sleep(0.1)


def test_a_killed_master_costs_its_pages_and_is_found_again() -> None:
    clock = Clock()
    with mooncake_store() as servers:
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB"), clock=clock)
        pages = pages_of(1, 20, 4000)
        assert store.put(pages).result(60) == 20 and get(store, pages) == [Got.HIT] * 20
        servers.kill(MASTER)
        begun = time.monotonic()
        with pytest.raises(KvStoreError) as lost:
            store.put(pages_of(2, 3)).result(60)
        assert lost.value.failure is StoreFailure.UNAVAILABLE
        # A page that was read lately may be read again, since its memory is there.
        assert set(get(store, pages_of(3, 3))) == {Got.FAILED} and time.monotonic() - begun < 30
        servers.start_master()
        clock.now += 100
        assert set(get(store, pages)) <= {Got.HIT, Got.MISS}
        put_until_there(store, pages, clock)
        assert store.counters().corrupt == 0
        store.close()


def test_a_master_that_hangs_holds_nobody_for_long() -> None:
    clock = Clock()
    with mooncake_store() as servers:
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB&timeout=3"), clock=clock)
        pages = pages_of(1, 20, 4000)
        store.put(pages).result(60)
        servers.process(MASTER).send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(KvStoreError) as lost:
            store.put(pages_of(2, 3)).result(60)
        assert lost.value.failure is StoreFailure.UNAVAILABLE
        assert get(store, pages_of(3, 3)) == [Got.FAILED] * 3 and time.monotonic() - begun < 20
        servers.process(MASTER).send_signal(signal.SIGCONT)
        clock.now += 100
        assert get(store, pages) == [Got.HIT] * 20 and store.put(pages_of(2, 3)).result(60) == 3
        store.close()


def test_a_master_that_hangs_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would hold the interpreter's lock for seconds, and with it all of the worker."""
    with mooncake_store() as servers:
        from radixmesh.daemons.worker.kv_store import mooncake_backend

        def join() -> None:
            raise AssertionError("the library was asked to join a master that hangs")

        monkeypatch.setattr(mooncake_backend, "MooncakeDistributedStore", join)
        servers.process(MASTER).send_signal(signal.SIGSTOP)
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB"))
        assert get(store, pages_of(1, 3)) == [Got.FAILED] * 3
        servers.process(MASTER).send_signal(signal.SIGCONT)
        store.close()


def test_a_client_is_reached_by_its_own_address_alone() -> None:
    with mooncake_store() as servers, socket.create_server(("0.0.0.0", 0)) as other:
        before = open_listeners()
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB&segment=16MiB"))
        ports = [port for inode, port in open_listeners().items() if inode not in before]
        assert len(ports) == 2 and other.getsockname()[1] not in ports
        for port in ports:
            socket.create_connection(("127.0.0.1", port), 20).close()
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.2", port), 0.3)
        socket.create_connection(("127.0.0.2", other.getsockname()[1]), 20).close()
        store.close()


def test_a_master_that_comes_after_the_worker_is_joined() -> None:
    clock = Clock()
    with mooncake_store() as servers:
        servers.kill(MASTER)
        begun = time.monotonic()
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB"), clock=clock)
        assert time.monotonic() - begun < 5, "a worker starts without its store"
        assert get(store, pages_of(1, 3)) == [Got.FAILED] * 3
        servers.start_master()
        servers.kill(MEMORY)
        servers.start_memory()
        clock.now += 100
        assert store.put(pages_of(1, 3)).result(60) == 3 and get(store, pages_of(1, 3)) == [Got.HIT] * 3
        store.close()


def test_a_full_store_is_read_on() -> None:
    """Pages that were read lately stay, so that nothing can be evicted."""
    with mooncake_store(segment_mib=32, lease_ms=120_000) as servers:
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=64MiB"))
        pages = pages_of(1, 40, 1_000_000)
        num_stored = 0
        with pytest.raises(KvStoreError) as full:
            for page in pages:
                store.put([page]).result(60)
                num_stored += 1
                assert get(store, [page]) == [Got.HIT]
        assert full.value.failure is StoreFailure.FULL and 20 < num_stored < 34
        with pytest.raises(KvStoreError) as off:
            store.put(pages_of(3, 1))
        assert off.value.failure is StoreFailure.OFF
        assert get(store, pages[:num_stored]) == [Got.HIT] * num_stored
        store.close()


def test_a_store_that_evicts_takes_all_and_has_the_newest() -> None:
    with mooncake_store(segment_mib=32, lease_ms=200) as servers:
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=64MiB"))
        for chain in range(12):
            assert store.put(pages_of(chain, 10, 1_000_000)).result(60) == 10, chain
        got = [one for chain in range(12) for one in get(store, pages_of(chain, 10, 1_000_000))]
        assert got[-10:] == [Got.HIT] * 10
        assert 10 <= got.count(Got.HIT) <= 32 and got.count(Got.HIT) + got.count(Got.MISS) == 120
        store.close()


def test_memory_that_is_gone_costs_its_pages() -> None:
    clock = Clock()
    with mooncake_store() as servers:
        store = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB&timeout=3"), clock=clock)
        pages = pages_of(1, 20, 4000)
        store.put(pages).result(60)
        servers.kill(MEMORY)
        assert set(get(store, pages)) <= {Got.FAILED, Got.MISS}
        clock.now += 100
        with pytest.raises(KvStoreError):
            store.put(pages_of(2, 3)).result(60)
        servers.start_memory()
        put_until_there(store, pages, clock)
        assert store.counters().corrupt == 0
        store.close()


def test_workers_can_give_the_memory() -> None:
    """Pages lie in the memory of a worker, whoever has put them, and go with it."""
    with mooncake_store() as servers:
        servers.kill(MEMORY)
        first = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB&segment=64MiB&host=127.0.0.1"))
        clock = Clock()
        second = KvStore(open_backend(f"mooncake://{servers.master}?pool=16MiB"), clock=clock)
        pages = pages_of(1, 20, 4000)
        put_until_there(second, pages, clock)
        assert get(first, pages) == get(second, pages) == [Got.HIT] * 20
        first.close()
        assert set(get(second, pages)) <= {Got.FAILED, Got.MISS}
        second.close()


def test_a_missing_library_of_the_system_is_named() -> None:
    """As where libibverbs is not installed: the package is there and cannot be loaded."""
    program = (
        "import sys, types\n"
        "package = types.ModuleType('mooncake')\n"
        "package.__path__ = []\n"
        "sys.modules['mooncake'] = package\n"
        "from radixmesh.daemons.worker.kv_store.backend import KvStoreError\n"
        "try:\n"
        "    from radixmesh.daemons.worker.kv_store.opening import open_backend\n"
        "    open_backend('mooncake://127.0.0.1:1')\n"
        "except KvStoreError as error:\n"
        "    print(error.failure.name, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.startswith("SETTINGS") and "libibverbs1" in done.stdout, done.stdout
