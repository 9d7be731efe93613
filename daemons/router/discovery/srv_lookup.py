"""SRV records of a DNS name (RFC 2782), asked of the servers of /etc/resolv.conf over UDP, over TCP what is cut short.

The system's resolver knows no SRV records, so this module speaks the protocol (RFC 1035) itself. Whoever answers may be
anyone: a message is at most 64 KiB, a name 255 bytes, pointers go backwards only, and so many records are read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from radixmesh.daemons.router.discovery.source import SourceError
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.lookup import look_up
from radixmesh.daemons.runtime.rpc.name_watch import Lookup

_PORT = 53
_TYPE_SRV, _CLASS_IN = 33, 1
_HEADER = struct.Struct(">HHHHHH")
_QUESTION_END = struct.Struct(">HH")
_RECORD = struct.Struct(">HHIH")
_SRV = struct.Struct(">HHH")
_IS_ANSWER, _IS_CUT, _RECURSION_DESIRED, _RCODE = 0x8000, 0x0200, 0x0100, 0x000F
_NO_SUCH_NAME = 3
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_MAX_RECORDS = 1_024
# Of a name: 1,024 records with a chain of 32,000 each would hold the event loop for seconds.
_MAX_POINTERS = 32
_MAX_SERVERS = 3
# Lookups of targets at a time: each takes a thread of the resolver's.
_MAX_LOOKUPS = 8
_TIMEOUT_S = 2.0


class SrvRecord(NamedTuple):
    """One address of a service. Of those with the least priority number all are used; weight: not looked at."""

    priority: int
    weight: int
    port: int
    target: str


class SrvLookup:
    """A lookup as DnsSource takes it: every scheduler of a service as a pinned address, sorted.

    servers: addresses and ports of DNS servers, asked in turn; by default those of resolv_conf. look_up: of a target.
    """

    def __init__(
        self,
        *,
        servers: Sequence[tuple[str, int]] | None = None,
        look_up: Lookup = look_up,
        resolv_conf: Path = Path("/etc/resolv.conf"),
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._servers = servers
        self._look_up = look_up
        self._resolv_conf = resolv_conf
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_MAX_LOOKUPS)

    async def __call__(self, name: str) -> tuple[str, ...]:
        """Raises SourceError where no server answers, or one says nonsense."""
        found = best_of(await self._records(name))
        looked_up = await asyncio.gather(*(self._addresses(record) for record in found))
        return tuple(sorted({address for addresses in looked_up for address in addresses}))

    async def _addresses(self, record: SrvRecord) -> Sequence[str]:
        async with self._places:
            try:
                return await self._look_up(f"{record.target}:{record.port}")
            except MeshError:
                return ()  # A target that is no name of a host.

    async def _records(self, name: str) -> list[SrvRecord]:
        servers = self._servers
        if servers is None:
            servers = await asyncio.to_thread(_servers_of, self._resolv_conf)
        reason = f"{self._resolv_conf} names no DNS server"
        for server in servers[:_MAX_SERVERS]:
            query = query_of(name, secrets.randbits(16))
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await _ask_by_datagram(server, query)
                    if is_cut(answer):
                        answer = await _ask_by_stream(server, query)
                return records_of(answer, query)
            except TimeoutError:
                reason = f"{server[0]} gave no answer"
            except (OSError, EOFError) as error:
                reason = f"{server[0]} cannot be asked: {error}"
            except SourceError as error:
                reason = f"{server[0]}: {error}"
        raise SourceError(f"SRV records of {name}: {reason}")


def query_of(name: str, number: int) -> bytes:
    """The question for SRV records of a name. Raises SourceError for what is no DNS name."""
    labels = name.removesuffix(".").split(".")
    try:
        encoded = [label.encode("ascii") for label in labels]
    except UnicodeError:
        raise SourceError(f"{name} is no DNS name: write it in ASCII") from None
    if not all(1 <= len(label) <= 63 for label in encoded) or sum(map(len, encoded)) + len(encoded) > 254:
        raise SourceError(f"{name} is no DNS name: 1 to 63 characters between two dots, 253 in all")
    question = b"".join(bytes([len(label)]) + label for label in encoded) + b"\0"
    return _HEADER.pack(number, _RECURSION_DESIRED, 1, 0, 0, 0) + question + _QUESTION_END.pack(_TYPE_SRV, _CLASS_IN)


def is_cut(answer: bytes) -> bool:
    """True if the whole answer has to be asked for over TCP."""
    return len(answer) >= _HEADER.size and bool(_HEADER.unpack_from(answer)[1] & _IS_CUT)


def records_of(answer: bytes, query: bytes) -> list[SrvRecord]:
    """The SRV records of a message, none where the name has none. Raises SourceError for what is no answer to query."""
    try:
        number, flags, num_questions, num_answers, _, _ = _HEADER.unpack_from(answer)
        if number != _HEADER.unpack_from(query)[0] or not flags & _IS_ANSWER:
            raise SourceError("the answer is not to what was asked")
        code = flags & _RCODE
        if code == _NO_SUCH_NAME:
            return []
        if code:
            raise SourceError(f"the server refuses with code {code}")
        at = _HEADER.size
        if num_questions != 1 or answer[at : len(query)].lower() != query[at:].lower():
            raise SourceError("the answer is to another question")
        at, found = len(query), []
        for _ in range(min(num_answers, _MAX_RECORDS)):
            _, at = _name_at(answer, at)
            kind, of_class, _, length = _RECORD.unpack_from(answer, at)
            at += _RECORD.size
            if kind == _TYPE_SRV and of_class == _CLASS_IN:
                priority, weight, port = _SRV.unpack_from(answer, at)
                target, _ = _name_at(answer, at + _SRV.size)
                # The root, which is empty, says that there is no such service.
                if _HOST.fullmatch(target):
                    found.append(SrvRecord(priority, weight, port, target))
            at += length
        return found
    except (struct.error, IndexError, UnicodeError):
        raise SourceError("the answer is no DNS message") from None


def best_of(records: Sequence[SrvRecord]) -> list[SrvRecord]:
    """Those with the least priority number: the others stand in when none of these is there."""
    least = min((record.priority for record in records), default=0)
    return [record for record in records if record.priority == least]


def _name_at(message: bytes, at: int) -> tuple[str, int]:
    """The name that begins there, and where the next field begins. Pointers must go back: no loop."""
    labels: list[str] = []
    end, limit, size, num_pointers = -1, at, 0, 0
    while length := message[at]:
        if length & 0xC0 == 0xC0:
            target = (length & 0x3F) << 8 | message[at + 1]
            end = at + 2 if end < 0 else end
            num_pointers += 1
            if target >= limit:
                raise SourceError("the answer is no DNS message: a pointer goes forward")
            if num_pointers > _MAX_POINTERS:
                raise SourceError("the answer is no DNS message: a name of too many pointers")
            at = limit = target
            continue
        label = message[at + 1 : at + 1 + length]
        size += length + 1
        if length & 0xC0 or len(label) < length or size > 255:
            raise SourceError("the answer is no DNS message: a name is too long")
        labels.append(label.decode("ascii"))
        at += 1 + length
    return ".".join(labels), at + 1 if end < 0 else end


def _servers_of(resolv_conf: Path) -> list[tuple[str, int]]:
    try:
        lines = resolv_conf.read_text(errors="replace").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    named = [word[1] for word in words if len(word) > 1 and word[0] == "nameserver"]
    return [(name, _PORT) for name in named if _is_ip(name)]


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class _Datagram(asyncio.DatagramProtocol):
    """The first datagram with the query's number: others may be forged, and are waited past."""

    def __init__(self, number: bytes, answer: asyncio.Future[bytes]) -> None:
        self._number = number
        self._answer = answer

    def datagram_received(self, data: bytes, addr: object) -> None:
        if data[:2] == self._number and not self._answer.done():
            self._answer.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)


async def _ask_by_datagram(server: tuple[str, int], query: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()
    make: Callable[[], _Datagram] = lambda: _Datagram(query[:2], answer)  # noqa: E731
    transport, _ = await loop.create_datagram_endpoint(make, remote_addr=server)
    try:
        transport.sendto(query)
        return await answer
    finally:
        transport.close()


async def _ask_by_stream(server: tuple[str, int], query: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(len(query).to_bytes(2, "big") + query)
        return await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
    finally:
        writer.close()
