"""Sockets that listen on all interfaces, limited to some addresses: IPv4 and IPv6, and nobody else's sockets."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from radixmesh.daemons.worker.kv_store.listeners import limit_new, open_listeners, own_addresses


def is_reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 0.3).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("is_dual", [False, True])
def test_others_addresses_are_not_reached(is_dual: bool) -> None:
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual) as former:
        before = open_listeners()
        with (
            socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual) as new,
            socket.create_server(("127.0.0.1", 0)) as bound,
        ):
            port, ports = new.getsockname()[1], (former.getsockname()[1], bound.getsockname()[1])
            assert former.getsockname()[1] in before.values() and bound.getsockname()[1] not in before.values()
            assert limit_new(before, ["127.0.0.3", "127.0.0.1"]) == [port]
            assert is_reached("127.0.0.1", port) and is_reached("127.0.0.3", port)
            assert not is_reached("127.0.0.2", port)
            assert is_reached("127.0.0.2", ports[0]) and is_reached("127.0.0.1", ports[1])
            if is_dual:
                assert not is_reached("::1", port) and is_reached("::1", ports[0])
                assert limit_new(before, ["127.0.0.2", "::1"]) == [port]
                assert is_reached("::1", port) and is_reached("127.0.0.2", port) and not is_reached("127.0.0.1", port)


def test_a_connection_carries_data_both_ways() -> None:
    before = open_listeners()
    with socket.create_server(("", 0)) as server:
        limit_new(before, ["127.0.0.1"])
        with socket.create_connection(("127.0.0.1", server.getsockname()[1]), 20) as client:
            end, _ = server.accept()
            with end:
                data = bytes(range(256)) * 400
                client.sendall(data[:50_000])
                client.shutdown(socket.SHUT_WR)
                assert end.recv(50_000, socket.MSG_WAITALL) == data[:50_000]
                end.sendall(data[:50_000])
                assert client.recv(50_000, socket.MSG_WAITALL) == data[:50_000]


def test_looking_for_listeners_keeps_nothing_open() -> None:
    """In a process without other threads, which open and close what they want."""
    program = (
        "import os, socket, tempfile\n"
        "from radixmesh.daemons.worker.kv_store.listeners import open_listeners\n"
        "kept = tempfile.TemporaryFile(), socket.create_server(('', 0)), socket.socketpair()\n"
        "before = sorted(os.listdir('/proc/self/fd'))\n"
        "assert len(open_listeners()) == 1\n"
        "assert sorted(os.listdir('/proc/self/fd')) == before\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=200, check=True)


def test_own_addresses_are_those_that_can_be_bound() -> None:
    assert own_addresses("127.0.0.1") == ["127.0.0.1"]
    assert "127.0.0.1" in own_addresses("localhost")
    assert own_addresses("203.0.113.7") == [], "of a network for documentation: nobody has it"
    assert own_addresses("nobody.invalid") == []
