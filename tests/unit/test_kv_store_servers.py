"""Redis and S3 stores whose server is lost, full or wrong, and stores by URL."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xxhash")
from support.kv_stores import pages_of, redis_server, s3_server, targets_of

from radixmesh.daemons.worker.kv_store.backend import KvBackend, KvStoreError, StoreFailure
from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend
from radixmesh.daemons.worker.kv_store.opening import open_backend
from radixmesh.daemons.worker.kv_store.redis_backend import RedisBackend
from radixmesh.daemons.worker.kv_store.s3_backend import S3Backend
from radixmesh.daemons.worker.kv_store.store import Got, KvStore


def test_a_lost_redis_server_costs_its_pages_and_is_tried_again(tmp_path: Path) -> None:
    now = 100.0
    with redis_server(tmp_path) as url:
        store = KvStore(open_backend(url), clock=lambda: now)
        pages = pages_of(1, 5)
        assert store.put(pages).result(30) == 5
    assert store.get(targets_of(pages)).result(30) == [Got.FAILED] * 5
    with pytest.raises(KvStoreError) as off:
        store.get(targets_of(pages))
    assert off.value.failure is StoreFailure.OFF
    with pytest.raises(KvStoreError) as lost:
        store.put(pages).result(30)
    assert lost.value.failure is StoreFailure.UNAVAILABLE
    with redis_server(tmp_path, port=int(url.rsplit(":", 1)[1].split("/")[0])):
        now += 2.0
        assert store.put(pages).result(30) == 5
        assert store.get(targets_of(pages)).result(30) == [Got.HIT] * 5
        assert store.counters().failed == 5 and store.counters().write_failures == 1
        store.close()


def test_a_full_redis_server_is_read_on(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as url:
        store = KvStore(open_backend(url))
        pages = pages_of(1, 10)
        store.put(pages).result(30)
        with pytest.raises(KvStoreError) as full:
            store.put(pages_of(2, 100, 100_000)).result(30)
        assert full.value.failure is StoreFailure.FULL
        with pytest.raises(KvStoreError) as off:
            store.put(pages_of(3, 1))
        assert off.value.failure is StoreFailure.OFF
        assert store.get(targets_of(pages)).result(30) == [Got.HIT] * 10
        store.close()


def test_a_redis_server_that_evicts_keeps_the_budget_and_takes_all(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as url:
        store = KvStore(open_backend(url))
        for chain in range(20):
            assert store.put(pages_of(chain, 10, 100_000)).result(30) == 10
        got = [one for chain in range(20) for one in store.get(targets_of(pages_of(chain, 10, 100_000))).result(30)]
        assert 10 < got.count(Got.HIT) < 60 and got.count(Got.HIT) + got.count(Got.MISS) == 200
        store.close()


def test_a_record_longer_than_a_page_is_not_read_whole(tmp_path: Path) -> None:
    import redis

    with redis_server(tmp_path) as url, redis.Redis.from_url(url) as client:
        store = KvStore(open_backend(url))
        page = pages_of(1, 1)[0]
        client.set(b"radixmesh:kv:" + page.key, bytes(50_000_000))
        assert store.get(targets_of([page])).result(30) == [Got.CORRUPT]
        # The server has sent a record and a byte, and a few replies.
        assert int(client.info("stats")["total_net_output_bytes"]) < 20_000
        store.close()


def test_pages_expire(tmp_path: Path) -> None:
    import redis

    with redis_server(tmp_path) as url, redis.Redis.from_url(url) as client:
        store = KvStore(open_backend(f"{url}?expire=100"))
        page = pages_of(1, 1)[0]
        store.put([page]).result(30)
        assert 90 < client.ttl(b"radixmesh:kv:" + page.key) <= 100
        store.close()


def test_s3_without_server_or_bucket_fails_by_type(tmp_path: Path) -> None:
    with s3_server() as url:
        store = KvStore(open_backend(f"s3://no-such-bucket/a?endpoint={url}"))
        with pytest.raises(KvStoreError) as failed:
            store.put(pages_of(1, 3)).result(30)
        assert failed.value.failure is StoreFailure.UNAVAILABLE
        store.close()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        store = KvStore(S3Backend("kv-pages", endpoint_url=f"http://127.0.0.1:{port}", timeout_s=1.0))
        assert store.get(targets_of(pages_of(1, 3))).result(60) == [Got.FAILED] * 3
        store.close()


def test_stores_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    expected: list[tuple[str, type[KvBackend]]] = [
        (f"disk://{tmp_path}/a%20b?budget=8MiB&segment=2MiB&fsync=batch", DiskBackend),
        ("redis://user:secret@127.0.0.1:1/0?expire=60", RedisBackend),
        ("rediss://127.0.0.1:1/0", RedisBackend),
        ("s3://bucket/some/prefix", S3Backend),
    ]
    for url, kind in expected:
        backend = open_backend(url, rank=3)
        assert type(backend) is kind, url
        backend.close()
    assert (tmp_path / "a b" / "rank-3" / "lock").exists()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/var/kv",
        "ftp://host/kv",
        "disk:///var/kv",
        "disk://host/var/kv?budget=1GiB",
        "disk:var/kv?budget=1GiB",
        "disk:///nonexistent/kv?budget=1GB",
        "disk:///nonexistent/kv?budget=-1",
        "disk:///nonexistent/kv?budget=1KiB",
        "disk:///nonexistent/kv?budget=1GiB&budget=2GiB",
        "disk:///nonexistent/kv?budget=1GiB&fsync=often",
        "disk:///nonexistent/kv?budget=1GiB&colour=red",
        "redis://user:secret@host:port/0",
        "redis://user:secret@[::1/0",
        "redis://user:secret/more@host:1/0",
        "redis://user:secret#more@host:1/0",
        "redis://user:sec?secret@host:1/0",
        "redis://:secret/@host:1/0",
        "redis://user:secret@host:1/0?expire=soon",
        "redis://user:secret@host:1/0?expire=0",
        "redis://user:secret@host:1/0?" + "expire=1&" * 17,
        "s3:///prefix",
        "s3://bucket/prefix?endpoint=nothing",
        "nixl-file:///nonexistent/kv",
        "nixl-file://host/kv?budget=1GiB",
        "nixl-file:///nonexistent/kv?budget=1GB",
        "nixl-file:///nonexistent/kv?budget=1GiB&plugin=UCX",
        "nixl-file:///nonexistent/kv?budget=1GiB&pool=1KiB",
        "nixl-file:///nonexistent/kv?budget=1GiB&pool=1TiB",
        "nixl-file:///nonexistent/kv?budget=1GiB&timeout=0",
        "nixl-file:///nonexistent/kv?budget=1GiB&timeout=soon",
        "nixl-obj:///prefix",
        "nixl-obj://bucket/prefix?endpoint=nothing",
        "nixl-obj://bucket/prefix?budget=1GiB",
        "mooncake://",
        "mooncake://host",
        "mooncake://host:port",
        "mooncake://:1",
        "mooncake://host:1/path",
        "mooncake://user:secret@host:1",
        "mooncake://host:1?protocol=smoke",
        "mooncake://host:1?segment=all",
    ],
)
def test_urls_that_name_no_store_are_refused_without_their_password(url: str) -> None:
    """Also where the package is missing: that is told by the same type."""
    with pytest.raises(KvStoreError) as refused:
        open_backend(url)
    assert refused.value.failure is StoreFailure.SETTINGS
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [
        ("xxhash", "disk:///nonexistent/kv?budget=1GiB", "kv-store"),
        ("redis", "redis://127.0.0.1:1/0", "kv-redis"),
        ("boto3", "s3://bucket/prefix", "kv-s3"),
        ("nixl_cu13", "nixl-file:///nonexistent/kv?budget=1GiB", "kv-nixl"),
        ("boto3", "nixl-obj://bucket/prefix", "kv-s3"),
        ("nixl_cu13", "nixl-obj://bucket/prefix", "kv-nixl"),
        ("mooncake", "mooncake://127.0.0.1:1", "kv-mooncake"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(package: str, url: str, extra: str) -> None:
    program = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from radixmesh.daemons.worker.kv_store.backend import KvStoreError\n"
        "try:\n"
        "    from radixmesh.daemons.worker.kv_store.opening import open_backend\n"
        f"    open_backend({url!r})\n"
        "except KvStoreError as error:\n"
        "    print(error.failure.name, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.startswith("SETTINGS") and f"radixmesh[{extra}]" in done.stdout, done.stdout
