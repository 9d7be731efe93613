"""Pools follow the names that they were given: replicas that come, go and move."""

from __future__ import annotations

import asyncio

import pytest

from radixmesh.daemons.runtime.addresses import authority_of, parse_address, pin_address
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc import lookup
from radixmesh.daemons.runtime.rpc.name_watch import NameWatch, PeerPool


class RecordingPool(PeerPool):
    def __init__(self) -> None:
        self.members: list[str] = []
        self.busy: set[str] = set()

    def add(self, address: str) -> None:
        assert address not in self.members
        self.members.append(address)

    async def remove(self, address: str) -> None:
        self.members.remove(address)

    def can_remove(self, address: str) -> bool:
        return address not in self.busy


class Names:
    def __init__(self, **hosts: list[str]) -> None:
        self.hosts = hosts

    async def look_up(self, address: str) -> list[str]:
        return [pin_address(address, ip) for ip in self.hosts.get(address.partition(":")[0], [])]


def test_replicas_are_added_and_dropped_as_the_name_says() -> None:
    names, pool = Names(tok=["10.0.0.1"]), RecordingPool()
    watch = NameWatch(["tok:5"], pool, names.look_up)

    def refreshed(*hosts: str) -> list[str]:
        names.hosts["tok"] = list(hosts)
        asyncio.run(watch.refresh("tok:5"))
        return pool.members

    assert refreshed("10.0.0.1") == ["tok:5#10.0.0.1"]
    assert refreshed("10.0.0.1", "10.0.0.2") == ["tok:5#10.0.0.1", "tok:5#10.0.0.2"]
    pool.busy = {"tok:5#10.0.0.1"}
    assert refreshed("10.0.0.2") == ["tok:5#10.0.0.1", "tok:5#10.0.0.2"], "a draining replica still serves"
    pool.busy = set()
    assert refreshed("10.0.0.2") == ["tok:5#10.0.0.2"]
    assert refreshed() == ["tok:5#10.0.0.2"], "the only replica restarts: it is waited for"
    assert refreshed("10.0.0.3") == ["tok:5#10.0.0.3"]
    assert refreshed("10.0.0.2", "10.0.0.3") == ["tok:5#10.0.0.3", "tok:5#10.0.0.2"]


def test_sockets_hosts_and_everything_without_a_lookup_is_fixed() -> None:
    pool = RecordingPool()
    addresses = ["unix:/run/a.sock", "127.0.0.1:1", "[::1]:2", "localhost:3", "tok:4"]
    NameWatch(addresses, pool, Names().look_up).start()
    assert pool.members == addresses[:4]
    everything = RecordingPool()
    NameWatch(addresses, everything, None).start()
    assert everything.members == addresses


async def test_a_name_that_hangs_holds_up_no_other() -> None:
    hanging = asyncio.Event()

    async def look_up(address: str) -> list[str]:
        if address == "hangs:1":
            await hanging.wait()
        return [pin_address(address, "10.0.0.9")]

    pool = RecordingPool()
    running = asyncio.create_task(NameWatch(["hangs:1", "answers:2"], pool, look_up).run())
    async with asyncio.timeout(60):
        while not pool.members:
            await asyncio.sleep(0.01)
    running.cancel()
    assert pool.members == ["answers:2#10.0.0.9"]


def test_pinned_addresses_are_dialled_by_ip_and_named_by_name() -> None:
    assert parse_address("tok:50051#10.1.2.3") == "10.1.2.3:50051"
    assert parse_address("tok:50051#fd00::7") == "[fd00::7]:50051"
    assert authority_of("tok:50051#10.1.2.3") == "tok:50051"
    assert authority_of("tok:50051") is None and authority_of("unix:/a#b") is None
    with pytest.raises(MeshError):
        parse_address("tok#10.1.2.3")


async def test_lookup_gives_each_replica_once_and_nothing_for_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def answer(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host != "tok":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        stream = (socket.SOCK_STREAM, 6, "")
        v4 = [(socket.AF_INET, *stream, (f"10.0.0.{i}", port)) for i in (2, 1, 2)]
        return [(socket.AF_INET6, *stream, ("fd00::1", port, 0, 0)), *v4]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert await lookup.look_up("tok:7") == ("tok:7#10.0.0.1", "tok:7#10.0.0.2")
    assert await lookup.look_up("nobody:7") == ()
