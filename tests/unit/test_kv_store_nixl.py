"""Pages over NIXL: a folder that processes share, killed writers, torn files, full and hung file systems."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("xxhash")
pytest.importorskip("nixl_cu13", reason="nixl-cu13 is not installed: radixmesh[kv-nixl]")
from support.kv_stores import content, needs_nixl_obj, pages_of, s3_server, targets_of

from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.nixl_file_backend import NixlFileBackend
from radixmesh.daemons.worker.kv_store.nixl_storage import NixlStorage
from radixmesh.daemons.worker.kv_store.opening import open_backend
from radixmesh.daemons.worker.kv_store.shared_folder import SharedFolder
from radixmesh.daemons.worker.kv_store.store import Got, KvStore, Page

ROOT = Path(__file__).parents[2]
BUDGET = 4 << 20


def opened(folder: Path, **options: object) -> NixlFileBackend:
    return NixlFileBackend(folder, **({"budget_bytes": BUDGET, "pool_bytes": 4 << 20} | options))  # type: ignore[arg-type]


def get(store: KvStore, pages: list[Page]) -> list[Got]:
    wanted = targets_of(pages)
    got = store.get(wanted).result(30)
    for page, one in zip(wanted, got, strict=True):
        assert one is not Got.HIT or bytes(page.payload) == content(page.key, page.payload.nbytes)
    return got


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in ("ledger", "id")]


def folder_bytes(folder: Path) -> int:
    """Bytes of all records, written or not, in blocks."""
    num = 0
    for path in files(folder):
        try:
            num += -(-path.stat().st_size // 4096) * 4096
        except FileNotFoundError:
            continue
    return num


def path_of(folder: Path, page: Page) -> Path:
    return folder / page.key.hex()[:2] / f"{page.key.hex()}.page"


def test_no_kill_yields_a_wrong_page_or_breaks_the_budget(tmp_path: Path) -> None:
    """Two writers on one folder at a time, one after the other killed -9 at random moments; a third process reads."""
    rng = random.Random(1)
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}"}
    budget = 2 << 20
    reader = KvStore(opened(tmp_path, budget_bytes=budget))
    told: dict[int, list[int]] = {}
    writers: list[tuple[int, subprocess.Popen[str]]] = []

    def kill_first() -> None:
        seed, process = writers.pop(0)
        process.send_signal(signal.SIGKILL)
        told[seed] += [int(line) for line in process.communicate()[0].splitlines(keepends=True) if line.endswith("\n")]

    for seed in range(1, 5):
        command = [sys.executable, "-m", "support.kv_file_writer", str(tmp_path), str(budget), str(seed)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, "the writer does not start"
        told[seed] = [int(first)]
        writers.append((seed, process))
        time.sleep(rng.uniform(0.0, 0.2))
        assert folder_bytes(tmp_path) <= budget
        assert process.poll() is None, "a writer has found a page that is wrong"
        if len(writers) == 2:
            kill_first()
            for chain in told[seed][-1:] + told[seed - 1][-5:]:
                assert set(get(reader, pages_of(chain, 30, 4000))) <= {Got.HIT, Got.MISS}
    while writers:
        kill_first()
    assert folder_bytes(tmp_path) <= budget
    # The last of all that was told: nobody has written since, but what was on its way.
    assert get(reader, pages_of(told[4][-1], 30, 4000)) == [Got.HIT] * 30
    assert reader.counters().corrupt == 0
    reader.close()


def test_processes_keep_one_budget_and_find_what_others_wrote(tmp_path: Path) -> None:
    first, second = KvStore(opened(tmp_path)), KvStore(opened(tmp_path))
    for chain in range(0, 60, 2):
        first.put(pages_of(chain, 30, 4000)).result(30)
        second.put(pages_of(chain + 1, 30, 4000)).result(30)
        assert folder_bytes(tmp_path) <= BUDGET
    assert get(first, pages_of(59, 30, 4000)) == get(second, pages_of(58, 30, 4000)) == [Got.HIT] * 30
    assert first.counters().usage.evicted_pages and second.counters().usage.evicted_pages
    # Nearly all of it is used.
    assert folder_bytes(tmp_path) > BUDGET * 3 // 4
    first.close()
    second.close()


def test_torn_and_vanished_files_cost_their_pages_alone(tmp_path: Path) -> None:
    store = KvStore(opened(tmp_path))
    pages = pages_of(1, 10, 4000)
    store.put(pages).result(30)
    os.truncate(path_of(tmp_path, pages[2]), 100)
    path_of(tmp_path, pages[5]).unlink()
    os.truncate(path_of(tmp_path, pages[7]), 5000)
    expected = [Got.HIT] * 10
    expected[2] = expected[7] = Got.CORRUPT
    expected[5] = Got.MISS
    assert get(store, pages) == expected
    expected[2] = expected[7] = Got.MISS
    assert get(store, pages) == expected
    assert store.put(pages).result(30) == 3 and get(store, pages) == [Got.HIT] * 10
    store.close()


def test_a_file_that_is_cut_while_it_is_read_costs_its_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL 1.5 fails the whole transfer then, and the others are read again; before that it says that all is done."""
    store = KvStore(opened(tmp_path))
    pages = pages_of(1, 10, 4000)
    store.put(pages).result(30)
    real = SharedFolder.open

    def cut(self: SharedFolder, key: bytes) -> tuple[int, int] | None:
        found = real(self, key)
        if key == pages[4].key:
            os.truncate(path_of(tmp_path, pages[4]), 10)
        return found

    monkeypatch.setattr(SharedFolder, "open", cut)
    assert get(store, pages) == [*[Got.HIT] * 4, Got.CORRUPT, *[Got.HIT] * 5]
    store.close()


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file system of 1 MiB, in a name space of its own: the kernel refuses within NIXL's write."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from support.kv_stores import pages_of, targets_of\n"
        "from radixmesh.daemons.worker.kv_store.backend import KvStoreError\n"
        "from radixmesh.daemons.worker.kv_store.nixl_file_backend import NixlFileBackend\n"
        "from radixmesh.daemons.worker.kv_store.store import Got, KvStore\n"
        "folder = Path(sys.argv[1])\n"
        "store = KvStore(NixlFileBackend(folder, budget_bytes=64 << 20, pool_bytes=8 << 20))\n"
        "assert store.put(pages_of(1, 100, 4000)).result() == 100\n"
        "try:\n    store.put(pages_of(2, 250, 4000)).result()\n    sys.exit('no failure')\n"
        "except KvStoreError as error:\n    print(error.failure.name)\n"
        "print(store.get(targets_of(pages_of(1, 100, 4000))).result().count(Got.HIT))\n"
        "print(len(list((folder / 'new').iterdir())))\n"
        "store.close()\n"
    )
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1"'
    unshare = ["unshare", "--mount", "sh", "-c"]
    probe = subprocess.run([*unshare, mount, "sh", str(tmp_path)], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.decode().strip()}")
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}"}
    command = [*unshare, mount + ' && exec "$2" -c "$3" "$1"', "sh", str(tmp_path), sys.executable, script]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.stdout.split() == ["FULL", "100", "0"], result.stderr


def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    store = KvStore(opened(tmp_path), clock=lambda: now)
    pages = pages_of(1, 10, 4000)
    store.put(pages).result(30)
    before = store.counters().usage

    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if len(data) < 100:
            return real(fd, data, offset)  # The ledger, which is there already.
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(NixlStorage, "write", lambda *_: False)
        patch.setattr(os, "pwrite", full)
        with pytest.raises(KvStoreError) as failed:
            store.put(pages_of(2, 10, 4000)).result(30)
    assert failed.value.failure is StoreFailure.FULL
    with pytest.raises(KvStoreError) as off:
        store.put(pages_of(3, 1))
    assert off.value.failure is StoreFailure.OFF
    assert get(store, pages) == [Got.HIT] * 10 and len(files(tmp_path)) == 10
    assert store.counters().usage == before, "room that was not used is given back"
    now += 1.1
    assert store.put(pages_of(2, 10, 4000)).result(30) == 10
    store.close()


def test_a_hung_file_system_costs_no_caller_more_than_its_time(tmp_path: Path) -> None:
    """A pipe in place of a page: the kernel holds whoever opens it."""
    now = 100.0
    store = KvStore(opened(tmp_path, timeout_s=0.5), clock=lambda: now)
    pages = pages_of(1, 3, 4000)
    store.put(pages).result(30)
    path = path_of(tmp_path, pages[1])
    path.unlink()
    os.mkfifo(path)
    begun = time.monotonic()
    assert get(store, pages) == [Got.FAILED] * 3
    assert time.monotonic() - begun < 10
    now += 2.0
    assert get(store, [pages[0], pages[2]]) == [Got.HIT] * 2, "the other lanes go on"
    os.close(os.open(path, os.O_WRONLY))  # The kernel lets go.
    assert get(store, [pages[0]]) == [Got.HIT]
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_a_ledger_that_somebody_holds_is_not_waited_for_long(tmp_path: Path) -> None:
    now = 100.0
    store = KvStore(opened(tmp_path, timeout_s=0.6), clock=lambda: now)
    pages = pages_of(1, 3)
    with (tmp_path / "ledger").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(KvStoreError) as failed:
            store.put(pages).result(30)
        assert failed.value.failure is StoreFailure.UNAVAILABLE
    now += 2.0
    assert store.put(pages).result(30) == 3 and get(store, pages) == [Got.HIT] * 3
    store.close()


@pytest.mark.parametrize("ledger", [b"", b"x" * 32, bytes(32)])
def test_a_ledger_that_is_lost_is_counted_anew(tmp_path: Path, ledger: bytes) -> None:
    store = KvStore(opened(tmp_path))
    for chain in range(40):
        store.put(pages_of(chain, 30, 4000)).result(30)
    (tmp_path / "ledger").write_bytes(ledger)
    for chain in range(40, 60):
        store.put(pages_of(chain, 30, 4000)).result(30)
        assert folder_bytes(tmp_path) <= BUDGET
    usage = store.counters().usage
    assert (usage.num_bytes, usage.num_pages) == (folder_bytes(tmp_path), len(files(tmp_path)))
    store.close()


def test_what_killed_writers_leave_is_counted_and_goes(tmp_path: Path) -> None:
    KvStore(opened(tmp_path)).close()
    young, old = tmp_path / "new" / "young", tmp_path / "new" / "old"
    for path in (young, old):
        path.write_bytes(bytes(1 << 20))
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    (tmp_path / "00" / "notes.txt").write_text("of somebody else")
    store = KvStore(opened(tmp_path))
    assert young.exists() and not old.exists() and store.counters().usage.num_bytes == 1 << 20
    for chain in range(40):
        store.put(pages_of(chain, 30, 4000)).result(30)
        assert folder_bytes(tmp_path) <= BUDGET + 4096
    assert (tmp_path / "00" / "notes.txt").exists()
    store.close()


def test_a_smaller_budget_at_the_next_start(tmp_path: Path) -> None:
    store = KvStore(opened(tmp_path))
    for chain in range(30):
        store.put(pages_of(chain, 30, 4000)).result(30)
    store.close()
    store = KvStore(opened(tmp_path, budget_bytes=1 << 20))
    assert folder_bytes(tmp_path) <= 1 << 20
    assert get(store, pages_of(29, 30, 4000)) == [Got.HIT] * 30
    store.close()


def test_a_page_that_fits_no_lane_is_refused_and_not_found(tmp_path: Path) -> None:
    small = KvStore(opened(tmp_path, budget_bytes=64 << 20, pool_bytes=1 << 20))
    large = KvStore(opened(tmp_path, budget_bytes=64 << 20, pool_bytes=16 << 20))
    pages = [*pages_of(1, 1, 500_000), *pages_of(2, 2)]
    with pytest.raises(KvStoreError) as refused:
        small.put(pages).result(30)
    assert refused.value.failure is StoreFailure.TOO_LARGE
    assert large.put(pages).result(30) == 3
    assert get(small, pages) == [Got.MISS, Got.HIT, Got.HIT] and get(large, pages) == [Got.HIT] * 3
    for store in (small, large):
        store.close()


def test_a_plugin_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    try:
        open_backend(f"nixl-file://{tmp_path}?budget=1GiB&plugin=GDS").close()
    except KvStoreError as error:
        assert error.failure is StoreFailure.SETTINGS and "plugin GDS" in str(error) and "libcufile" in str(error)
    else:
        pytest.skip("GDS can be loaded here")


def test_objects_are_those_of_the_s3_store() -> None:
    needs_nixl_obj()
    import boto3

    with s3_server() as url:
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="kv-pages")
        place = f"kv-pages/some/prefix/?endpoint={url}"
        over_nixl, over_boto = (
            KvStore(open_backend(f"nixl-obj://{place}&pool=8MiB")),
            KvStore(open_backend(f"s3://{place}")),
        )
        pages = pages_of(1, 20, 4000)
        assert over_nixl.put(pages[:10]).result(60) == 10 and over_boto.put(pages).result(60) == 10
        assert get(over_boto, pages) == get(over_nixl, pages) == [Got.HIT] * 20
        # Some that are not there, and one that is shorter than a page: the others come all the same.
        name = f"some/prefix/{pages[3].key.hex()}"
        client.put_object(
            Bucket="kv-pages", Key=name, Body=client.get_object(Bucket="kv-pages", Key=name)["Body"].read(50)
        )
        over_boto.remove([pages[5].key]).result(30)
        expected = [Got.HIT] * 20
        expected[3], expected[5] = Got.CORRUPT, Got.MISS
        assert get(over_nixl, pages) == expected
        assert get(over_nixl, pages_of(2, 5)) == [Got.MISS] * 5
        over_nixl.close()
        over_boto.close()


def test_objects_without_bucket_or_server_fail_by_type_and_in_time() -> None:
    needs_nixl_obj()
    now = 100.0
    with s3_server() as url:
        store = KvStore(open_backend(f"nixl-obj://no-such-bucket?endpoint={url}&timeout=3"), clock=lambda: now)
        with pytest.raises(KvStoreError) as failed:
            store.put(pages_of(1, 3)).result(60)
        assert failed.value.failure is StoreFailure.UNAVAILABLE
        store.close()
        store = KvStore(open_backend(f"nixl-obj://kv-pages?endpoint={url}&timeout=1"), clock=lambda: now)
    begun = time.monotonic()
    assert store.get(targets_of(pages_of(1, 3))).result(60) == [Got.FAILED] * 3
    assert time.monotonic() - begun < 20
    now += 100
    with pytest.raises(KvStoreError) as failed:
        store.put(pages_of(1, 3)).result(60)
    assert failed.value.failure is StoreFailure.UNAVAILABLE
    store.close()
