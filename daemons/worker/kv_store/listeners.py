"""Sockets of a library that listens on all interfaces, limited to the addresses that it is to be reached by.

Such a library takes no address to bind to. A socket filter (classic BPF) on what it listens on does the same: the
kernel drops packets to any other address of this machine before a connection is made. Linux alone has it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Container, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_ATTACH_FILTER = 26
# Of the filter machine: load a word or half a word of a packet, jump if equal, return.
_LOAD, _LOAD_HALF, _JUMP, _RETURN = 0x20, 0x28, 0x15, 0x06
# Offsets that stand for a packet's protocol and its IP header.
_PROTOCOL, _IP_HEADER = -0x1000, -0x100000
# Of the destination in that header.
_DESTINATION = {4: 16, 6: 24}
_ETHERTYPE = {4: 0x0800, 6: 0x86DD}
_FDS = Path("/proc/self/fd")
# Jumps are of one byte.
_MOST_ADDRESSES = 16


def own_addresses(host: str) -> list[str]:
    """Addresses of this machine that a name or an address stands for; empty: none, as where it is that of a NAT."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return []
    return sorted(address for address in found if _is_own(address))[:_MOST_ADDRESSES]


def open_listeners() -> dict[int, int]:
    """Ports on which this process listens on all interfaces, by the inode of the socket; none where the system does not
    tell."""
    try:
        return {inode: int(listener.getsockname()[1]) for inode, listener in _open_listeners()}
    except OSError:
        return {}


def limit_new(before: Container[int], addresses: Sequence[str]) -> list[int]:
    """Limits those that are not in open_listeners() of before; their ports. Raises OSError where no filter is taken."""
    ports: list[int] = []
    for inode, listener in _open_listeners():
        if inode not in before:
            _limit(listener, addresses)
            ports.append(int(listener.getsockname()[1]))
    return ports


def _open_listeners() -> Iterator[tuple[int, socket.socket]]:
    """Sockets of this process that listen on all interfaces, by inode; each is good until the next one is asked for."""
    for name in os.listdir(_FDS):
        try:
            fd = os.dup(int(name))
        except OSError:  # It is closed by now.
            continue
        if not stat.S_ISSOCK((status := os.fstat(fd)).st_mode):
            os.close(fd)
            continue
        try:
            found = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue
        with found:
            if _listens_everywhere(found):
                yield status.st_ino, found


def _listens_everywhere(found: socket.socket) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return False
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return ip_address(found.getsockname()[0].partition("%")[0]).is_unspecified


def _limit(listener: socket.socket, addresses: Sequence[str]) -> None:
    program = b"".join(struct.pack("HBBI", *code) for code in _program([ip_address(each) for each in addresses]))
    memory = ctypes.create_string_buffer(program)
    listener.setsockopt(
        socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", len(program) // 8, ctypes.addressof(memory))
    )


def _program(addresses: Sequence[IPv4Address | IPv6Address]) -> list[tuple[int, int, int, int]]:
    """Instructions (code, jump if equal, jump if not, value): whole packets to one of the addresses are taken."""
    code: list[tuple[int, int, int, int]] = []
    for address in addresses:
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        body: list[tuple[int, int, int, int]] = []
        for at, word in enumerate(words):
            left = 2 * (len(words) - 1 - at) + 1
            body += [_load(_IP_HEADER + _DESTINATION[address.version] + 4 * at), (_JUMP, 0, left, word)]
        code += [_load(_PROTOCOL, _LOAD_HALF), (_JUMP, 0, len(body) + 1, _ETHERTYPE[address.version]), *body]
        code.append((_RETURN, 0, 0, 0xFFFFFFFF))
    return [*code, (_RETURN, 0, 0, 0)]


def _load(offset: int, code: int = _LOAD) -> tuple[int, int, int, int]:
    return code, 0, 0, offset & 0xFFFFFFFF


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
