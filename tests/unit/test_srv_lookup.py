"""SRV records: what a DNS server says becomes addresses, and what it should not say becomes an error."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.discovery.dns_source import DnsSource
from radixmesh.daemons.router.discovery.source import SourceError
from radixmesh.daemons.router.discovery.sources import make_sources
from radixmesh.daemons.router.discovery.srv_lookup import SrvLookup, SrvRecord, best_of, query_of, records_of

NAME = "_grpc._tcp.schedulers.example"
Answer = Callable[[bytes], bytes]


def encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label) + b"\0"


def answer_of(query: bytes, records: Sequence[SrvRecord], *, flags: int = 0x8180, is_cut: bool = False) -> bytes:
    message = query[:2] + struct.pack(">HHHHH", flags | (0x0200 if is_cut else 0), 1, len(records), 0, 0) + query[12:]
    for record in records:
        target = struct.pack(">HHH", record.priority, record.weight, record.port) + encoded(record.target)
        # Its name is a pointer to that of the question, as servers write it.
        message += b"\xc0\x0c" + struct.pack(">HHIH", 33, 1, 60, len(target)) + target
    return message


def records(*addresses: tuple[int, int, str]) -> list[SrvRecord]:
    return [SrvRecord(priority, 0, port, target) for priority, port, target in addresses]


@asynccontextmanager
async def dns_server(by_datagram: Answer, by_stream: Answer | None = None) -> AsyncIterator[tuple[str, int]]:
    class Server(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            self.transport.sendto(b"forged" + data, addr)
            self.transport.sendto(by_datagram(data), addr)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        query = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        assert by_stream is not None
        message = by_stream(query)
        writer.write(len(message).to_bytes(2, "big") + message)
        writer.close()

    streams = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = streams.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Server, local_addr=("127.0.0.1", port))
    try:
        yield "127.0.0.1", port
    finally:
        transport.close()
        streams.close()
        await streams.wait_closed()


async def no_lookup(address: str) -> tuple[str, ...]:
    return (f"{address}#10.0.0.1",)


async def test_records_of_the_first_priority_become_pinned_addresses() -> None:
    told = records((10, 50053, "a.example"), (10, 50054, "b.example"), (20, 1, "spare.example"))
    async with dns_server(lambda query: answer_of(query, told)) as server:
        found = await SrvLookup(servers=[server], look_up=no_lookup, timeout_s=30)(NAME)
    assert found == ("a.example:50053#10.0.0.1", "b.example:50054#10.0.0.1")


async def test_an_answer_that_is_cut_short_is_asked_for_over_tcp() -> None:
    told = records(*((0, 50_000 + i, f"replica-{i}.example") for i in range(200)))

    def short(query: bytes) -> bytes:
        return answer_of(query, [], is_cut=True)

    async with dns_server(short, lambda query: answer_of(query, told)) as server:
        found = await SrvLookup(servers=[server], look_up=no_lookup, timeout_s=30)(NAME)
    assert len(found) == 200


async def test_a_server_that_says_nonsense_gives_way_to_the_next_and_the_last_ones_reason_is_told() -> None:
    told = records((0, 50053, "a.example"))
    async with (
        dns_server(lambda query: query[:2] + b"nonsense") as bad,
        dns_server(lambda query: answer_of(query, told)) as good,
    ):
        assert await SrvLookup(servers=[bad, good], look_up=no_lookup, timeout_s=30)(NAME)
        with pytest.raises(SourceError, match="no DNS message"):
            await SrvLookup(servers=[bad], look_up=no_lookup, timeout_s=30)(NAME)
    with pytest.raises(SourceError, match="names no DNS server"):
        await SrvLookup(resolv_conf=Path("/nowhere"), look_up=no_lookup)(NAME)


async def test_a_source_of_srv_records_follows_them() -> None:
    told = records((0, 50053, "a.example"))
    async with dns_server(lambda query: answer_of(query, told)) as server:
        source = DnsSource(NAME, SrvLookup(servers=[server], look_up=no_lookup, timeout_s=30), look_s=0.01)
        lists = source.watch()
        assert await anext(lists) == {"a.example:50053#10.0.0.1"}
        told[:] = records((0, 50053, "b.example"))
        async with asyncio.timeout(30):
            while await anext(lists) != {"b.example:50053#10.0.0.1"}:
                pass
        await lists.aclose()


def test_a_source_is_named_by_its_service() -> None:
    assert make_sources([f"srv:{NAME}"])
    for name in ("srv:", "srv:a..b", f"srv:{'x' * 64}.example", f"srv:{'a.' * 200}b", "srv:b\u00fccher.example"):
        with pytest.raises(ValueError, match="srv:_SERVICE"):
            make_sources([name])


def test_names_that_no_host_has_and_the_root_are_left_out() -> None:
    query = query_of(NAME, 7)
    told = records((0, 1, "a.example"), (0, 2, ""), (0, 3, "unix:/x"), (0, 4, "b#c"))
    assert [record.port for record in records_of(answer_of(query, told), query)] == [1]
    assert records_of(answer_of(query, [], flags=0x8183), query) == []
    with pytest.raises(SourceError, match="code 2"):
        records_of(answer_of(query, [], flags=0x8182), query)
    with pytest.raises(SourceError, match="not to what was asked"):
        records_of(answer_of(query_of(NAME, 8), []), query)
    with pytest.raises(SourceError, match="another question"):
        records_of(answer_of(query_of("_grpc._tcp.scheduler5.example", 7), []), query)


def test_only_the_first_priority_counts() -> None:
    assert best_of([]) == []
    assert [record.port for record in best_of(records((5, 1, "a"), (3, 2, "b"), (3, 3, "c")))] == [2, 3]


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_whatever_a_server_says_is_read_or_refused(tail: bytes, index: int, value: int) -> None:
    query = query_of(NAME, 7)
    message = bytearray(answer_of(query, records((0, 1, "a.example"), (0, 2, "b.example"))) + tail)
    message[index % len(message)] = value
    for said in (bytes(message), query[:2] + tail, bytes(message[: index % len(message)])):
        with suppress(SourceError):
            assert len(records_of(said, query)) <= 1_024


def test_pointers_that_would_go_round_for_ever_are_refused_and_so_are_long_chains_of_them() -> None:
    query = query_of(NAME, 7)
    head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, 1, 0, 0) + query[12:]
    at = len(head)
    with pytest.raises(SourceError, match="pointer goes forward"):
        records_of(head + (0xC000 | at).to_bytes(2, "big") + bytes(10), query)
    # Records whose names are long chains of pointers in the data of the first one.
    start = at + 1 + 10
    chain = b"".join((0xC000 | (12 if not i else start + 2 * (i - 1))).to_bytes(2, "big") for i in range(6000))
    count = struct.pack(">HHHHH", 0x8180, 1, 65_535, 0, 0)
    first = b"\0" + struct.pack(">HHIH", 1, 1, 0, len(chain)) + chain
    record = (0xC000 | (start + 2 * 5999)).to_bytes(2, "big") + struct.pack(">HHIH", 1, 1, 0, 0)
    with pytest.raises(SourceError, match="pointers"):
        records_of(query[:2] + count + query[12:] + first + record * 4000, query)
