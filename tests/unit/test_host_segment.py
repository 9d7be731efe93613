"""Host memory that outlives its worker: what is found again is what was saved, whatever moment the end came at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.segment_writer import LIMITS, NUM_PAGES, PAGE_BYTES, PAGE_SIZE, bytes_of, records_on, save, segment_at

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import PageMove
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.host_memory import host_segment
from radixmesh.daemons.worker.host_memory.host_pool import ArrayHostPool
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.tiers.host_records import HostRecords
from radixmesh.daemons.worker.plans.tiers.host_tier import HostTier

NONE = np.zeros(0, np.int32)


class Life:
    """A worker's host memory from its start to its end."""

    def __init__(self, path: Path, **changes: object) -> None:
        self.segment = segment_at(path, **changes)
        self.memory = self.segment.open(NUM_PAGES, PAGE_BYTES)
        self.records: HostRecords = records_on(self.segment)

    def save(
        self, pages: list[int], ids: IntArray, previous: int = -1, prefix: IntArray = NONE, name: str = ""
    ) -> None:
        save(self.records, self.memory, as_ints(pages), ids, previous, prefix, name)

    def end(self) -> None:
        self.segment.close()

    def check(self) -> list[int]:
        """Pages that are found, whose bytes are those of their prefixes."""
        found = np.flatnonzero(self.records.filled).tolist()
        for page in found:
            ids, at = [self.records.ids[page]], page
            while (above := int(self.records.previous_pages[at])) >= 0:
                assert self.records.filled[above] == PAGE_SIZE
                assert self.records.generations[above] == self.records.previous_generations[at]
                assert self.records.namespace_indexes[above] == self.records.namespace_indexes[at]
                ids.append(self.records.ids[above])
                at = above
            name = self.records.namespaces[self.records.namespace_indexes[page]]
            assert self.memory[page].tobytes() == bytes_of(np.concatenate(ids[::-1]), name), page
        return found


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "kv"


def ids_of(start: int, num_pages: int) -> IntArray:
    return np.arange(start, start + num_pages * PAGE_SIZE, dtype=np.int32)


def test_the_next_life_finds_what_the_last_one_saved(path: Path) -> None:
    life = Life(path)
    life.save([4, 2], ids_of(0, 2), name="0:salt")
    life.save([9], ids_of(50, 1), previous=2, prefix=ids_of(0, 2), name="0:salt")
    life.save([5], ids_of(90, 1))
    life.end()
    life = Life(path)
    assert life.check() == [2, 4, 5, 9] and life.segment.num_dropped == 0
    assert life.records.namespaces[life.records.namespace_indexes[9]] == "0:salt"
    # Its pages are used as its own, and go on to a third.
    life.save([7], ids_of(60, 1), previous=9, prefix=np.concatenate([ids_of(0, 2), ids_of(50, 1)]), name="0:salt")
    life.save([5], ids_of(95, 1))
    life.end()
    life = Life(path)
    assert life.check() == [2, 4, 5, 7, 9]
    life.records.flush()
    life.end()
    assert Life(path).check() == []


def test_a_page_that_is_granted_again_is_lost_with_what_continues_it(path: Path) -> None:
    life = Life(path)
    life.save([0, 1, 2], ids_of(0, 3))
    life.save([3], ids_of(30, 1))
    life.records.grant(as_ints([1]), np.array([1]), previous_pages=as_ints([-1]), namespaces=[""], weights_version=1)
    life.memory[1, :100] = 7  # Killed amid the copy.
    life.end()
    life = Life(path)
    assert life.check() == [0, 3] and life.segment.num_dropped == 1
    life.end()
    # Dropped for good: page 1 in its first generation is no page that page 2 continues.
    life = Life(path)
    life.save([1], ids_of(70, 1))
    life.end()
    assert Life(path).check() == [0, 1, 3]


def test_a_new_group_keeps_them_with_equal_generations(path: Path) -> None:
    life = Life(path)
    for start in range(0, 100, 20):
        life.save([0, 1], ids_of(start, 2))
    life.records.grant(as_ints([5]), np.array([1]), previous_pages=as_ints([-1]), namespaces=[""], weights_version=1)
    life.records.reset()
    assert life.check() == [0, 1] and not life.records.generations.any()
    life.end()
    assert Life(path).check() == [0, 1]


def test_records_that_were_cut_short_are_none(path: Path) -> None:
    """Any word of a record that is another, and a record at another place."""
    for word in range(host_segment.IDS + PAGE_SIZE):
        life = Life(path)
        life.records.flush()
        life.save([0, 1, 2], ids_of(0, 3))
        life.save([4], ids_of(40, 1))
        life.segment.rows[1, word] ^= 1 << 7
        life.end()
        life = Life(path)
        assert life.check() == [0, 4], word
        life.end()
    life = Life(path)
    life.segment.rows[7] = life.segment.rows[4]
    life.end()
    assert Life(path).check() == [0, 4]


def test_a_name_that_is_not_the_pages_is_noticed(path: Path) -> None:
    life = Life(path)
    life.save([0], ids_of(0, 1), name="0:salt")
    life.save([1], ids_of(0, 1))
    life.segment.name_rows[life.segment.names["0:salt"], 4] ^= 1
    life.end()
    assert Life(path).check() == [1]


def test_names_without_end_take_bounded_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_segment, "NUM_NAMES", 8)
    life = Life(path)
    for number in range(100):
        life.save([number % 5], ids_of(number, 1), name=f"0:{number}")
    life.save([9], ids_of(0, 1), name="0:" + "long" * 300)
    life.end()
    life = Life(path)
    assert life.check() == [0, 1, 2, 3, 4], "the long name is kept for one life alone"
    for page in range(10, 20):
        life.save([page], ids_of(page, 1), name=f"1:x{page}")
    life.end()
    assert len(Life(path).check()) == 8, "one for each name that there is room for"


@pytest.mark.parametrize("change", ["identity", "boot", "sizes"])
def test_what_another_left_is_not_believed(path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(path)
    life.save([0], ids_of(0, 1))
    life.end()
    if change == "boot":
        monkeypatch.setattr(host_segment, "boot_id", lambda: b"other".ljust(36))
    if change == "sizes":
        other = segment_at(path)
        other.open(NUM_PAGES, PAGE_BYTES - 8)
        assert not len(other.committed().pages)
        return
    assert Life(path, **({"identity": b"o" * 32} if change == "identity" else {})).check() == []


def test_files_that_cannot_be_had_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_segment, "_LOCK_S", 0.0)

    def refusal(path: Path, num_pages: int = NUM_PAGES) -> str:
        with pytest.raises(MeshError) as caught:
            segment_at(path).open(num_pages, PAGE_BYTES)
        assert caught.value.reason_name == "INVALID_ARGUMENT"
        return str(caught.value)

    life = Life(tmp_path / "kv")
    assert "another worker's" in refusal(tmp_path / "kv")
    life.end()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    assert "cannot be opened" in refusal(tmp_path / "link")
    assert "cannot be opened" in refusal(tmp_path / "absent" / "kv")
    open_file = tmp_path / "open"
    open_file.touch(0o666)
    open_file.chmod(0o666)
    assert "open to others" in refusal(open_file)

    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is no file" in refusal(tmp_path / "pipe")

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "cannot hold" in refusal(tmp_path / "full") and (tmp_path / "full").stat().st_size == 0


def test_flags_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="host-kv-bytes"):
        WorkerSettings(backend=Backend.CPU, host_kv_segment=Path("/dev/shm/kv"))


def kill_writers(path: Path, seeds: range) -> int:
    """Kills a writer for each seed amid its saves; pages that were found, of all."""
    rng, num_found = np.random.default_rng(seeds.start), 0
    for seed in seeds:
        command = [sys.executable, "-m", "support.segment_writer", str(path), str(seed)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            # It is somewhere in an endless loop of saves, wherever this falls.
            _wait_until_changed(path, rng)
            process.send_signal(signal.SIGKILL)
            process.wait()
        life = Life(path)
        num_found += len(life.check())
        life.end()
    return num_found


def _wait_until_changed(path: Path, rng: np.random.Generator) -> None:
    """Until the writer has changed some records since now, a random number of times."""
    start = host_segment.HEADER_BYTES + host_segment.NUM_NAMES * host_segment.NAME_BYTES
    before, num, wanted = b"", 0, int(rng.integers(2, 16))
    with path.open("rb", buffering=0) as file:
        while num < wanted:
            now = os.pread(file.fileno(), 4 * 10 * NUM_PAGES, start)
            num += now != before
            before = now
            time.sleep(0.0005)


def test_a_killed_writer_leaves_no_wrong_page(path: Path) -> None:
    assert kill_writers(path, range(3)) > 20


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sixty_killed_writers_leave_no_wrong_page(path: Path) -> None:
    assert kill_writers(path, range(100, 160)) > 400


def test_a_segment_is_opened_by_a_pool(path: Path) -> None:
    plane = np.arange(80, dtype=np.uint8).reshape(10, 8)
    for number in range(2):
        segment = HostSegment(path, identity=b"i" * 32, page_size=PAGE_SIZE)
        pool = ArrayHostPool(64, {"kv": plane}, segment=segment)
        if number == 0:
            pool.save(as_ints([3, 4]), as_ints([1, 7]))
            segment.close()
        assert pool.memory[[1, 7]].tolist() == plane[[3, 4]].tolist()


def test_a_plan_that_runs_while_the_worker_ends_changes_no_segment(path: Path) -> None:
    """Behind close() it may be another worker's."""
    plane = np.arange(NUM_PAGES * 8, dtype=np.uint8).reshape(NUM_PAGES, 8)
    segment = HostSegment(path, identity=b"i" * 32, page_size=PAGE_SIZE)
    pool = ArrayHostPool(8 * NUM_PAGES, {"kv": plane}, segment=segment)
    tier, device = HostTier(pool, LIMITS), PageRecordTable(LIMITS)
    names = {"previous_pages": as_ints([-1]), "namespaces": [""], "weights_version": 1}
    device.grant(as_ints([3, 4]), np.array([2]), **names)
    device.filled[[3, 4]] = PAGE_SIZE

    def moved(device_page: int, host_page: int) -> PageMove:
        return PageMove(device_pages=as_ints([device_page]), host_pages=as_ints([host_page]), previous_page=-1)

    tier.save([moved(3, 1)], device, 1)
    tier.close()
    for late in (lambda: tier.save([moved(4, 1)], device, 1), tier.flush, tier.reset):
        with pytest.raises(RuntimeError, match="the worker ends"):
            late()
    tier.take_loaded(device)
    again = HostSegment(path, identity=b"i" * 32, page_size=PAGE_SIZE)
    rows = again.open(NUM_PAGES, 8)
    assert again.committed().pages.tolist() == [1] and rows[1].tolist() == plane[3].tolist()
