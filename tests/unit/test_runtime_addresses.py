"""Addresses of daemons."""

import pytest

from radixmesh.daemons.runtime.addresses import parse_address, split_host_port
from radixmesh.daemons.runtime.errors import MeshError


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("localhost:0", "localhost:0"),
        ("0.0.0.0:65535", "0.0.0.0:65535"),
        ("[::1]:80", "[::1]:80"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("unix:///run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_usable_addresses(address: str, parsed: str) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        ":80",
        "host:",
        "host:http",
        "host:65536",
        "host:-1",
        "host:" + "9" * 5000,
        "unix:",
        "unix:/" + "x" * 107,
    ],
)
def test_unusable_addresses_say_what_to_write(address: str) -> None:
    with pytest.raises(MeshError, match=r"host:port|107 bytes") as refusal:
        parse_address(address)
    assert refusal.value.reason_name == "INVALID_ARGUMENT"


@pytest.mark.parametrize("host", ["x" * 64, f"{'x' * 64}.example", "a..b", ".a", "ab." * 100, "\u0130" * 60])
def test_names_that_no_lookup_takes_are_refused_before_they_are_looked_up(host: str) -> None:
    with pytest.raises(MeshError, match="253 characters") as refusal:
        parse_address(f"{host}:80")
    assert refusal.value.reason_name == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "host", ["x" * 63, "a.example.", "[fe80::1%eth0]", "b\u00fccher.example", "_grpc._tcp.example"]
)
def test_names_that_a_lookup_takes(host: str) -> None:
    assert parse_address(f"{host}:80") == f"{host}:80"


def test_host_and_port_of_ipv6() -> None:
    assert split_host_port("[::1]:80") == ("::1", 80)
