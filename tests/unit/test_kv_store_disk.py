"""The disk store's log: kills, torn tails, damage anywhere, full disks, restarts with other sizes."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xxhash")
from support.kv_stores import content, pages_of, targets_of

from radixmesh.daemons.worker.kv_store import segment as segment_module
from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend, FsyncPolicy
from radixmesh.daemons.worker.kv_store.store import Got, KvStore, Page

ROOT = Path(__file__).parents[2]
BUDGET, SEGMENT = 256 << 10, 64 << 10


def disk(folder: Path, **options: object) -> DiskBackend:
    return DiskBackend(folder, **({"budget_bytes": BUDGET, "segment_bytes": SEGMENT} | options))  # type: ignore[arg-type]


def get(store: KvStore, pages: list[Page]) -> list[Got]:
    wanted = targets_of(pages)
    got = store.get(wanted).result(30)
    for page, one in zip(wanted, got, strict=True):
        assert one is not Got.HIT or bytes(page.payload) == content(page.key, page.payload.nbytes)
    return got


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_no_kill_yields_a_wrong_page_or_loses_one_that_was_stored(tmp_path: Path) -> None:
    """kill -9 of a writing process at random moments, again and again on one folder."""
    rng = random.Random(1)
    chains: list[int] = []
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    for seed in range(1, 7):
        command = [sys.executable, "-m", "support.kv_store_writer", str(tmp_path), str(seed)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, "the writer does not start"
        time.sleep(rng.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        told = [first, *process.stdout.read().splitlines(keepends=True)]
        process.wait()
        chains += [int(line) for line in told if line.endswith("\n")]
        assert folder_bytes(tmp_path) <= 4 << 20
        backend = DiskBackend(tmp_path, budget_bytes=4 << 20, segment_bytes=1 << 20)
        store = KvStore(backend)
        # A removal takes the first page of a chain 20 chains later.
        newest = chains[-15:]
        for chain in newest:
            assert get(store, pages_of(chain, 30, 4000)) == [Got.HIT] * 30, (seed, chain, newest)
        for chain in chains[:-15]:
            assert set(get(store, pages_of(chain, 30, 4000))) <= {Got.HIT, Got.MISS}
        assert store.counters().corrupt == 0
        store.close()


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours runs behind it."""


def abandon(backend: DiskBackend) -> None:
    """Lets go what the kernel lets go of a killed process."""
    os.close(backend._lock_fd)
    if backend._fd is not None:
        os.close(backend._fd)


def test_a_write_that_ends_anywhere_leaves_whole_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends within a pwritev(), after any number of its bytes: also within heads, indexes and new files."""
    rng = random.Random(2)
    real = os.pwritev
    left = 0

    def torn(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal left
        data = b"".join(buffers)
        num = os.pwrite(fd, data[:left], offset) if left else 0
        left -= num
        if num < len(data):
            raise Killed
        return num

    stored: list[Page] = []
    for round_ in range(150):
        backend = disk(tmp_path)
        assert folder_bytes(tmp_path) <= BUDGET
        targets = targets_of(stored[-60:])
        results = backend.read([_target(page) for page in targets])
        assert all(result.name == "READ" for result in results), round_
        monkeypatch.setattr(segment_module.os, "pwritev", torn)
        left = rng.randrange(0, 100_000)
        acknowledged = []
        try:
            for batch in range(20):
                pages = pages_of(1000 * round_ + batch, 7, rng.randrange(0, 1500))
                backend.write([_record(page) for page in pages])
                acknowledged += pages
        except Killed:
            pass
        stored = (stored + acknowledged)[-60:]
        monkeypatch.setattr(segment_module.os, "pwritev", real)
        abandon(backend)
    assert len(stored) == 60


def _record(page: Page):  # type: ignore[no-untyped-def]
    from radixmesh.daemons.worker.kv_store.store import stored_page

    return stored_page(page)


def _target(page: Page):  # type: ignore[no-untyped-def]
    from radixmesh.daemons.worker.kv_store.backend import ReadTarget
    from radixmesh.daemons.worker.kv_store.records import head_bytes

    return ReadTarget(page.key, memoryview(bytearray(head_bytes(len(page.ids)))), page.payload)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_damage_of_any_byte_of_a_file_never_yields_a_wrong_page(tmp_path: Path, is_sealed: bool) -> None:
    pages = pages_of(1, 6, 40)
    backend = disk(tmp_path)
    store = KvStore(backend)
    store.put(pages).result()
    store.close() if is_sealed else abandon(backend)
    (path,) = tmp_path.glob("*.seg")
    sound = path.read_bytes()
    num_hits = 0
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
        store = KvStore(disk(tmp_path))
        num_hits += get(store, pages).count(Got.HIT)
        store.close()
        for left in tmp_path.glob("*.seg"):
            left.unlink()
    # A page damaged costs itself, a head those behind it where there is no index.
    assert num_hits > (4.5 if is_sealed else 2) * len(sound)


def test_a_file_that_ends_anywhere_keeps_the_pages_before(tmp_path: Path) -> None:
    pages = pages_of(1, 6, 40)
    store = KvStore(disk(tmp_path))
    store.put(pages).result()
    store.close()
    (path,) = tmp_path.glob("*.seg")
    sound = path.read_bytes()
    record = 76 + 16 + 40
    for at in range(len(sound)):
        path.write_bytes(sound[:at])
        store = KvStore(disk(tmp_path))
        whole = min(6, max(0, at - 24) // record)
        assert get(store, pages) == [Got.HIT] * whole + [Got.MISS] * (6 - whole), at
        store.close()
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_nothing_more_is_switched_off_and_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    now = 100.0
    store = KvStore(disk(tmp_path), clock=lambda: now)
    pages = pages_of(1, 10, 4000)
    store.put(pages).result()
    real = os.pwritev

    def full(fd: int, buffers: list[memoryview], offset: int) -> int:
        # Some of it fits, as on a disk that fills up.
        if offset % 3:
            return os.pwrite(fd, bytes(buffers[0])[:10], offset)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(segment_module.os, "pwritev", full)
    with pytest.raises(KvStoreError) as failed:
        store.put(pages_of(2, 10, 4001)).result(30)
    assert failed.value.failure is (StoreFailure.UNAVAILABLE if error == errno.EIO else StoreFailure.FULL)
    for _ in range(3):
        with pytest.raises(KvStoreError) as refused:
            store.put(pages_of(3, 1))
        assert refused.value.failure is StoreFailure.OFF
    assert get(store, pages) == [Got.HIT] * 10
    now += 1.1
    with pytest.raises(KvStoreError):
        store.put(pages_of(2, 10, 4001)).result(30)
    now += 1.1
    with pytest.raises(KvStoreError) as refused:
        store.put(pages_of(3, 1))  # Twice as long this time.
    assert refused.value.failure is StoreFailure.OFF
    monkeypatch.setattr(segment_module.os, "pwritev", real)
    now += 1.0
    assert store.put(pages_of(2, 40, 4001)).result(30) == 40
    assert get(store, pages_of(2, 40, 4001)).count(Got.HIT) >= 30
    assert store.counters().write_failures == 2 and store.counters().refused == 4
    store.close()
    assert folder_bytes(tmp_path) <= BUDGET
    store = KvStore(disk(tmp_path))
    assert get(store, pages_of(2, 40, 4001)).count(Got.HIT) >= 30
    store.close()


def test_a_real_full_file_system(tmp_path: Path) -> None:
    """A process whose files may not grow beyond 48 KiB, by its own limit: the kernel refuses, not a fake."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from support.kv_stores import pages_of, targets_of\n"
        "from radixmesh.daemons.worker.kv_store.backend import KvStoreError\n"
        "from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend\n"
        "from radixmesh.daemons.worker.kv_store.store import Got, KvStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, 48 << 10))\n"
        f"store = KvStore(DiskBackend(Path(sys.argv[1]), budget_bytes={BUDGET}, segment_bytes={SEGMENT}))\n"
        "assert store.put(pages_of(1, 9, 4000)).result() == 9\n"
        "try:\n    store.put(pages_of(2, 9, 4000)).result()\n    sys.exit('no failure')\n"
        "except KvStoreError as error:\n    print(error.failure.name)\n"
        "print(store.get(targets_of(pages_of(1, 9, 4000))).result().count(Got.HIT))\n"
        "store.close()\n"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=env)
    assert result.stdout.split() == ["FULL", "9"], result.stderr
    store = KvStore(disk(tmp_path))
    assert get(store, pages_of(1, 9, 4000)) == [Got.HIT] * 9
    store.close()


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    store = KvStore(disk(tmp_path))
    with pytest.raises(KvStoreError) as refused:
        disk(tmp_path)
    assert refused.value.failure is StoreFailure.IN_USE
    store.close()
    KvStore(disk(tmp_path)).close()


def test_files_of_others_stay_and_unknown_segments_go(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / f"{7:016x}.seg").write_bytes(b"something else")
    store = KvStore(disk(tmp_path))
    assert (tmp_path / "notes.txt").exists() and not list(tmp_path.glob("*.seg"))
    store.put(pages_of(1, 3)).result()
    store.close()


def test_another_budget_at_the_next_start(tmp_path: Path) -> None:
    store = KvStore(disk(tmp_path))
    for chain in range(6):
        store.put(pages_of(chain, 10, 4000)).result()
    abandoned = store.backend
    assert isinstance(abandoned, DiskBackend)
    abandon(abandoned)
    abandoned._fd = None
    for budget, segment in ((100 << 10, 25 << 10), (512 << 10, 128 << 10), (64 << 10, 16 << 10)):
        store = KvStore(disk(tmp_path, budget_bytes=budget, segment_bytes=segment))
        assert folder_bytes(tmp_path) <= budget
        for chain in range(20, 40):
            store.put(pages_of(chain, 3, 4000)).result()
            assert folder_bytes(tmp_path) <= budget, (budget, chain)
        assert get(store, pages_of(39, 3, 4000)) == [Got.HIT] * 3
        store.close()


@pytest.mark.parametrize("policy", list(FsyncPolicy))
def test_removals_outlive_restarts_by_index_and_by_scan(tmp_path: Path, policy: FsyncPolicy) -> None:
    for is_sealed in (True, False):
        backend = disk(tmp_path, fsync=policy)
        store = KvStore(backend)
        pages = pages_of(int(is_sealed), 6)
        store.put(pages).result()
        store.remove([pages[0].key, pages[1].key]).result()
        store.put(pages[:1]).result()
        store.close() if is_sealed else abandon(backend)
        again = KvStore(disk(tmp_path))
        assert get(again, pages) == [Got.HIT, Got.MISS, *[Got.HIT] * 4]
        again.close()


def test_a_segment_that_somebody_deletes_costs_its_pages_alone(tmp_path: Path) -> None:
    store = KvStore(disk(tmp_path))
    for chain in range(3):
        store.put(pages_of(chain, 10, 4000)).result()
    sorted(tmp_path.glob("*.seg"))[0].unlink()
    got = [get(store, pages_of(chain, 10, 4000)) for chain in range(3)]
    assert got[0] == [Got.CORRUPT] * 10 and got[2] == [Got.HIT] * 10
    assert get(store, pages_of(0, 10, 4000)) == [Got.MISS] * 10
    assert store.put(pages_of(0, 10, 4000)).result() == 10 and get(store, pages_of(0, 10, 4000)) == [Got.HIT] * 10
    store.close()


def test_a_store_whose_files_are_deleted_goes_on_being_written(tmp_path: Path) -> None:
    """As by a job that cleans up old files: also of pages that would be rescued from what is deleted next."""
    store = KvStore(disk(tmp_path))
    pages = pages_of(1, 40, 4000)
    store.put(pages).result(30)
    assert get(store, pages).count(Got.HIT) == 40
    for path in tmp_path.glob("*.seg"):
        path.unlink()
    for chain in range(2, 8):
        assert store.put(pages_of(chain, 40, 4000)).result(30) == 40
    assert Got.HIT in get(store, pages_of(7, 40, 4000))
    assert folder_bytes(tmp_path) <= BUDGET
    store.close()


def test_records_side_by_side_are_read_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KvStore(disk(tmp_path))
    pages = pages_of(1, 12, 4000)
    store.put(pages).result()
    calls, real = [], os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return real(fd, buffers, offset)

    monkeypatch.setattr(segment_module.os, "preadv", counted)
    assert get(store, pages[::-1]) == [Got.HIT] * 12 and calls == [24]
    assert get(store, [*pages[:3], *pages[6:9]]) == [Got.HIT] * 6 and calls == [24, 6, 6]
    store.close()


def test_short_reads_and_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    monkeypatch.setattr(
        segment_module.os, "pwritev", lambda fd, views, at: os.pwrite(fd, bytes(views[0])[: rng.integers(1, 900)], at)
    )

    def some(fd: int, views: list[memoryview], at: int) -> int:
        data = os.pread(fd, min(views[0].nbytes, int(rng.integers(1, 900))), at)
        views[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(segment_module.os, "preadv", some)
    store = KvStore(disk(tmp_path))
    pages = pages_of(1, 40, 3000)
    store.put(pages).result()
    store.close()
    store = KvStore(disk(tmp_path))
    assert get(store, pages) == [Got.HIT] * 40
    store.close()
