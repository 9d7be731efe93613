"""Hosts of a network as namespaces of this machine, each with an address of its own, joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class NetHost:
    """A namespace. address: by which the others, and this process, reach it."""

    name: str
    address: str
    link: str

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """A process there. It sees no other network than that of the hosts."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)  # type: ignore[call-overload, no-any-return]

    def cut(self) -> None:
        """Its cable is out: packets are lost, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")


@contextmanager
def net_hosts(num: int) -> Iterator[list[NetHost]]:
    """Skips the test, with the reason, where the machine has no `ip` or lets nobody make namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` here: install iproute2")
    number = os.getpid()
    # Addresses for tests between networks (RFC 2544), unlike those of another run beside this one.
    prefix, bridge = f"198.{18 + number % 2}.{number // 2 % 256}", f"rmbr{number}"
    hosts = [NetHost(f"rm{number}-{index}", f"{prefix}.{index + 1}", f"rm{number}v{index}") for index in range(num)]
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            _ip("netns", "add", hosts[0].name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        _ip("addr", "add", f"{prefix}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            if host is not hosts[0]:
                _ip("netns", "add", host.name)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host.link, "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            # At once, with the end inside: that of a namespace would go some time after its last process.
            _ip("link", "del", host.link, check=False)
            _ip("netns", "del", host.name, check=False)
        _ip("link", "del", bridge, check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=30.0)
