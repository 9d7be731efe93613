"""Discovery: sources' lists as members of the pool; a source that fails keeps its last list and says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.daemons.router.discovery.discovery import Discovery
from radixmesh.daemons.router.discovery.dns_source import DnsSource
from radixmesh.daemons.router.discovery.docker_source import DockerSource
from radixmesh.daemons.router.discovery.file_source import MAX_FILE_BYTES, FileSource
from radixmesh.daemons.router.discovery.kubernetes_source import KubernetesSource
from radixmesh.daemons.router.discovery.source import AddressSource, SourceError
from radixmesh.daemons.router.discovery.sources import make_sources

A, B, C = "10.0.0.1:50053", "10.0.0.2:50053", "10.0.0.3:50053"


class Members:
    """Addresses that are in use; `fixed` were there before."""

    def __init__(self, fixed: set[str] | None = None) -> None:
        self.there = set(fixed or ())
        self.retired: list[str] = []

    def add(self, address: str) -> bool:
        is_new = address not in self.there
        self.there.add(address)
        return is_new

    def retire(self, address: str, *, moves_outputs: bool) -> None:
        assert moves_outputs
        self.there.remove(address)
        self.retired.append(address)


def discovery(members: Members, *names: str, most: int = 100) -> Discovery:
    return Discovery(dict.fromkeys(names), members, max_schedulers=most)  # type: ignore[arg-type]


def test_lists_become_members_and_an_empty_one_holds_the_last() -> None:
    members = Members({C})
    found = discovery(members, "file", "dns")
    found.take("file", frozenset((A, B, C, "no address")))
    assert members.there == {A, B, C} and found.states["file"].num_ignored == 1
    found.take("file", frozenset())
    assert members.there == {A, B, C} and "names no address" in found.states["file"].error
    found.take("dns", frozenset((A,)))
    found.take("file", frozenset((B,)))
    assert members.there == {A, B, C} and not members.retired, "another source names A; C was configured"
    assert not found.states["file"].error
    found.take("dns", frozenset((C,)))
    assert members.there == {B, C} and members.retired == [A]


def test_no_more_are_used_than_may_be_and_those_in_use_stay() -> None:
    members = Members()
    found = discovery(members, "file", most=2)
    found.take("file", frozenset((B, C)))
    found.take("file", frozenset((A, B, C)))
    assert members.there == {B, C} and found.states["file"].num_ignored == 1
    found.take("file", frozenset((A, C)))
    assert members.there == {A, C}
    many = frozenset(f"10.1.{n // 250}.{n % 250}:1" for n in range(5000))
    found.take("file", many)
    assert len(members.there) == 2


_LISTS = st.frozensets(st.sampled_from([A, B, C, "nonsense", "10.0.0.9:1"]), max_size=5)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), _LISTS), max_size=20), st.integers(1, 4))
def test_what_is_used_is_what_is_named_within_the_bound(steps: list[tuple[str, frozenset[str]]], most: int) -> None:
    members, last = Members(), {"one": frozenset[str](), "two": frozenset[str]()}
    found = discovery(members, "one", "two", most=most)
    for name, addresses in steps:
        found.take(name, addresses)
        last[name] = addresses or last[name]
        assert members.there <= {address for addresses in last.values() for address in addresses}
        assert "nonsense" not in members.there and len(members.there) <= most
        used = set().union(*(state.addresses for state in found.states.values()))
        assert used == members.there


class Broken(AddressSource):
    """Says a list, fails, says another."""

    def __init__(self, error: Exception) -> None:
        self.num_calls = 0
        self._error = error

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        self.num_calls += 1
        yield frozenset((A,)) if self.num_calls == 1 else frozenset((A, B))
        if self.num_calls == 1:
            raise self._error
        await asyncio.Event().wait()


# A name that cannot be encoded, and a service account's token with a line break.
@pytest.mark.parametrize("error", [SourceError("the disk is full"), UnicodeError("label too long"), Exception("a bug")])
async def test_a_source_that_fails_is_asked_again_and_its_list_holds(error: Exception) -> None:
    members = Members()
    found = Discovery({"x": Broken(error)}, members, max_schedulers=9)  # type: ignore[arg-type]
    task = asyncio.create_task(found.run())
    await _until(lambda: bool(found.states["x"].error))
    assert str(error) in found.states["x"].error and members.there == {A}
    await _until(lambda: members.there == {A, B})
    assert not found.states["x"].error
    task.cancel()


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    path.write_text(f"# ours\n\n {A} \n{B}\n")
    watch = FileSource(path, look_s=0.01).watch()
    assert await anext(watch) == {A, B}
    path.write_text(f"{A}\n")
    assert await anext(watch) == {A}
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match="UTF-8"):
        await anext(watch)
    path.write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(SourceError, match="bytes"):
        await anext(FileSource(path).watch())
    path.unlink()
    with pytest.raises(OSError, match="No such file"):
        await anext(FileSource(path).watch())


async def test_a_name_is_resolved_again_and_again() -> None:
    answers = [(A, B), (B,), ()]

    async def lookup(name: str) -> tuple[str, ...]:
        return answers.pop(0)

    watch = DnsSource("schedulers:50053", lookup, look_s=0.0).watch()
    assert [await anext(watch), await anext(watch)] == [{A, B}, {B}]
    with pytest.raises(SourceError, match="resolved"):
        await anext(watch)


class FakeApi:
    """An HTTP server: `answer` gets (target, headers) and yields status and pieces; a piece is a chunk."""

    def __init__(self, answer: Callable[[str, dict[str, str]], tuple[int, AsyncIterator[bytes]]]) -> None:
        self._answer = answer
        self.targets: list[str] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            target = head[0].split(" ")[1]
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            self.targets.append(target)
            self.headers.append(headers)
            status, pieces = self._answer(target, headers)
            writer.write(f"HTTP/1.1 {status} X\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            async for piece in pieces:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def container(ip: str) -> dict[str, object]:
    return {"Id": "x", "NetworkSettings": {"Networks": {"mesh": {"IPAddress": ip, "Gateway": "10.0.0.254"}}}}


async def test_containers_with_the_label_are_found_by_the_engines_socket(tmp_path: Path) -> None:
    lists = [[container("10.0.0.1"), container("10.0.0.2"), container("")], [container("10.0.0.2")], [{"Id": "n"}]]
    socket = str(tmp_path / "docker.sock")
    api = FakeApi(lambda target, headers: (200, pieces_of(json.dumps(lists.pop(0)).encode())))
    server = await asyncio.start_unix_server(api, socket)
    async with server:
        watch = DockerSource("radixmesh.role=scheduler", 50053, socket, look_s=0.0).watch()
        assert [await anext(watch), await anext(watch), await anext(watch)] == [{A, B}, {B}, set()]
    filters = json.loads(parse_qs(urlsplit(api.targets[0]).query)["filters"][0])
    assert filters == {"label": ["radixmesh.role=scheduler"], "status": ["running"]}
    with pytest.raises(OSError, match="No such file"):
        await anext(DockerSource("x", 1, str(tmp_path / "nobody")).watch())


@pytest.mark.parametrize(
    "status, body", [(500, b"[]"), (200, b"{}"), (200, b"no JSON"), (200, b'[{"NetworkSettings": 3}]')]
)
async def test_an_engine_that_says_nonsense_is_an_error(tmp_path: Path, status: int, body: bytes) -> None:
    socket = str(tmp_path / "docker.sock")
    server = await asyncio.start_unix_server(FakeApi(lambda *_: (status, pieces_of(body))), socket)
    async with server:
        with pytest.raises(SourceError, match="Docker engine"):
            await anext(DockerSource("x", 1, socket).watch())


def slice_of(
    name: str, *ips: str, version: int = 1, ready: bool | None = True, **conditions: bool
) -> dict[str, object]:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "endpoints": [{"addresses": [ip], "conditions": {"ready": ready, **conditions}} for ip in ips] or None,
        "ports": [{"name": "metrics", "port": 9000}, {"name": "grpc", "port": 50053}],
    }


def event(kind: str, found: object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


@asynccontextmanager
async def cluster(
    tmp_path: Path,
    lists: list[tuple[list[dict[str, object]], str]],
    watches: list[tuple[int, list[bytes]]],
    pause_s: float = 0.0,
) -> AsyncIterator[tuple[FakeApi, KubernetesSource]]:
    """An API server that gives these lists and watches in turn; the last watch stays open."""

    def answer(target: str, headers: dict[str, str]) -> tuple[int, AsyncIterator[bytes]]:
        if "watch=1" not in target:
            items, version = lists.pop(0)
            body = json.dumps({"metadata": {"resourceVersion": version}, "items": items}).encode()
            return 200, pieces_of(body[: len(body) // 2], body[len(body) // 2 :])
        status, events = watches.pop(0)
        return status, _then_wait(events) if not watches else pieces_of(*events)

    (tmp_path / "token").write_text("secret\n")
    api = FakeApi(answer)
    server = await asyncio.start_server(api, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        yield api, KubernetesSource("prod/mesh", "grpc", api=url, account=tmp_path, pause_s=pause_s)
    finally:
        server.close()


async def _then_wait(events: list[bytes]) -> AsyncIterator[bytes]:
    for piece in events:
        yield piece
    await asyncio.sleep(600)


async def test_endpoint_slices_are_listed_watched_and_listed_again_when_changes_were_missed(tmp_path: Path) -> None:
    first = [slice_of("s1", "10.0.0.1", "10.0.0.2", version=5), slice_of("s2", "10.0.0.9", ready=False)]
    modified = event("MODIFIED", slice_of("s1", "10.0.0.1", version=8))
    watches = [
        (200, [modified[:20], modified[20:] + event("ADDED", slice_of("s3", "10.0.0.3", version=9))]),
        (
            200,
            [event("BOOKMARK", {"metadata": {"resourceVersion": "12"}}), event("DELETED", slice_of("s3", version=13))],
        ),
        (200, [event("ERROR", {"code": 410, "message": "too old resource version"})]),
        (410, []),
        (200, [event("MODIFIED", slice_of("s1", "10.0.0.2", version=31, ready=None, terminating=False))]),
    ]
    async with cluster(tmp_path, [(first, "5"), ([slice_of("s1", "10.0.0.2")], "20"), (first, "30")], watches) as (
        api,
        source,
    ):
        watch = source.watch()
        found = [await anext(watch) for _ in range(8)]
        assert found == [{A, B}, {A}, {A, C}, {A, C}, {A}, {B}, {A, B}, {B}]
        await watch.aclose()
    versions = [parse_qs(urlsplit(target).query).get("resourceVersion", [""])[0] for target in api.targets]
    assert versions == ["", "5", "9", "13", "", "20", "", "30"]
    assert all(headers["authorization"] == "bearer secret" for headers in api.headers)
    path = unquote(urlsplit(api.targets[0]).path)
    assert path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    assert "labelSelector=kubernetes.io/service-name=mesh" in unquote(api.targets[0])


async def test_watches_that_end_at_once_are_opened_with_pauses(tmp_path: Path) -> None:
    first = [slice_of("s1", "10.0.0.1")]
    async with cluster(tmp_path, [(first, "5")], [(200, [])] * 10_000, pause_s=0.2) as (api, source):
        watch = source.watch()
        assert await anext(watch) == {A}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await anext(watch)
        assert len(api.targets) < 20


async def test_terminating_pods_are_gone_and_ports_go_by_number_too(tmp_path: Path) -> None:
    leaving = slice_of("s1", "10.0.0.1", terminating=True)
    async with cluster(tmp_path, [([leaving, slice_of("s2", "fd00::7")], "1")], [(200, [])]) as (_, source):
        source.port = "7000"
        assert await anext(source.watch()) == {"[fd00::7]:7000"}


@pytest.mark.parametrize("code", [403, 500])
async def test_an_api_server_that_refuses_is_an_error_that_says_so(tmp_path: Path, code: int) -> None:
    async with cluster(tmp_path, [([slice_of("s", "10.0.0.1")], "1")], [(code, [])]) as (_, source):
        watch = source.watch()
        assert await anext(watch) == {A}
        with pytest.raises(SourceError, match=str(code)):
            await anext(watch)


async def test_a_line_without_end_and_nonsense_end_the_watch(tmp_path: Path) -> None:
    for events, found in (
        ([b"x" * (1 << 20)] * 6, "more than"),
        ([b"nonsense\n"], "no event"),
        ([b'{"type": 3}\n'], "no event"),
    ):
        async with cluster(tmp_path, [([slice_of("s", "10.0.0.1")], "1")], [(200, events)]) as (_, source):
            watch = source.watch()
            await anext(watch)
            with pytest.raises(SourceError, match=found):
                await anext(watch)


def test_sources_are_made_of_their_names_or_refused() -> None:
    names = ("file:/etc/schedulers", "dns:sched:50053", "docker:role=scheduler:50053", "kubernetes:prod/mesh:grpc")
    assert list(make_sources(names)) == list(names)
    for wrong in (
        "file:",
        "ftp:x",
        "dns:sched",
        "docker:role",
        "docker:role:x",
        "docker:role:0",
        "kubernetes:mesh:grpc",
        "x",
    ):
        with pytest.raises(ValueError, match="--discover"):
            make_sources([wrong])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
