"""Names of stores: equal where pages are found by each other, and never with a password in it."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("xxhash")
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.scheduler.group.rank_hellos import group_of
from radixmesh.daemons.worker.kv_store.backend import KvBackend
from radixmesh.daemons.worker.kv_store.identity import store_id
from radixmesh.daemons.worker.kv_store.keys import PageFormat
from radixmesh.daemons.worker.kv_store.memory_backend import MemoryBackend
from radixmesh.daemons.worker.kv_store.shared_folder import SharedFolder
from radixmesh.worker.v1 import worker_pb2

FORMAT = PageFormat(weights_digest="w", compute="c", kv_dtype="bf16", kv_layout="l", page_size=16)


def backend(*, is_shared: bool = True, medium_id: str = "") -> KvBackend:
    made = MemoryBackend(budget_bytes=1)
    made.is_shared, made.medium_id = is_shared, medium_id
    return made


def name(url: str, form: PageFormat = FORMAT) -> str:
    found = store_id(url, backend(), form)
    assert re.fullmatch("[0-9a-f]{32}", found)
    return found


@pytest.mark.parametrize(
    ("one", "same", "another"),
    [
        ("redis://a:secret@Kv.example:6379/0", "rediss://kv.example/0?expire=60", "redis://kv.example/1"),
        ("redis://kv.example/0", "redis://other:pw@kv.example/0/", "redis://kv.example:6380/0"),
        ("s3://bucket/a", "nixl-obj://bucket/a/?pool=8MiB", "s3://bucket/b"),
        ("s3://b/a?endpoint=http://s3.example:9000", "nixl-obj://b/a?endpoint=http://s3.example:9000", "s3://b/a"),
        ("mooncake://m.example:50051", "mooncake://m.example:50051?segment=4GiB", "mooncake://m.example:50052"),
    ],
)
def test_urls_of_one_store_have_one_name(one: str, same: str, another: str) -> None:
    assert name(one) == name(same) != name(another)


@pytest.mark.parametrize("url", ["redis://127.0.0.1/0", "redis://localhost/0", "s3://b?endpoint=http://[::1]:9000"])
def test_loopback_is_of_one_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = name(url)
    assert name(url) == here
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert name(url) != here and name("redis://kv.example/0") == name("redis://kv.example/0")


def test_other_kv_is_not_found_in_the_same_store_and_a_disk_has_no_name() -> None:
    url = "redis://kv.example/0"
    for change in ({"weights_digest": "x"}, {"kv_dtype": "fp8"}, {"page_size": 1}, {"shard": 1, "num_shards": 2}):
        assert name(url, replace(FORMAT, **change)) != name(url)
    assert store_id("disk:///kv?budget=1GiB", backend(is_shared=False), FORMAT) == ""
    # A medium that has a name of its own: whatever it is called by.
    paths = ("nixl-file:///mnt/kv?budget=1GiB", "nixl-file:///var/kv?budget=2GiB")
    assert len({store_id(path, backend(medium_id="x"), FORMAT) for path in paths}) == 1
    assert len({store_id(paths[0], backend(medium_id=medium), FORMAT) for medium in "xy"}) == 2


def test_a_folder_keeps_its_name(tmp_path: Path) -> None:
    def opened(folder: str) -> SharedFolder:
        return SharedFolder(tmp_path / folder, budget_bytes=1 << 20, timeout_s=5.0)

    one = opened("a")
    assert re.fullmatch("[0-9a-f]{64}", one.medium_id) and opened("a").medium_id == one.medium_id
    assert opened("b").medium_id != one.medium_id
    assert opened("a").totals.num_files == 0, "it is no page"
    # Whatever a stranger has put there: it is read in part.
    (tmp_path / "a" / "id").write_bytes(b"x" * 100_000)
    assert len(opened("a").medium_id) == 64
    (tmp_path / "a" / "id").unlink()
    (tmp_path / "a" / "id").mkdir()
    assert opened("a").medium_id == ""


def ranks(ids: list[str], tp_size: int) -> list[worker_pb2.WorkerHello]:
    dp_size = len(ids) // tp_size
    hellos = []
    for rank, of_rank in enumerate(ids):
        layout = worker_pb2.RankLayout(
            tp_size=tp_size, tp_rank=rank % tp_size, dp_size=dp_size, dp_rank=rank // tp_size, ep_size=1
        )
        capabilities = worker_pb2.Capabilities(
            state=worker_pb2.WORKER_STATE_READY, page_size=1, num_pages=1, num_slots=1, max_tokens_per_step=1,
            max_plans_in_flight=1, world_size=len(ids), rank=rank, layout=layout, has_kv_store=True,
            kv_store_id=of_rank,
        )  # fmt: skip
        model = common_pb2.ModelIdentity(vocab_size=1, max_total_len=1)
        hellos.append(worker_pb2.WorkerHello(hello=common_pb2.Hello(model=model), capabilities=capabilities))
    return hellos


def test_a_group_has_the_store_of_its_ranks() -> None:
    def of(ids: list[str], tp_size: int = 1) -> str:
        return group_of(ranks(ids, tp_size)).kv_store_id

    assert of(["a"]) == of(["a", "a"]) == "a", "data-parallel ranks share it with each other, and with other groups"
    assert len(of(["a" * 1000])) == 64, "what a worker names is bounded"
    assert of(["a", "b"]) == of(["a", ""]) == of([""]) == ""
    assert len(of(["a", "b"], 2)) == 32 and of(["a", "b"], 2) == of(["a", "b", "a", "b"], 2)
    assert of(["a", "b"], 2) != of(["b", "a"], 2) and of(["a", "b", "b", "a"], 2) == of(["a", ""], 2) == ""
    assert of(["x" * 1000]) == "x" * 64, "a worker may say anything"
