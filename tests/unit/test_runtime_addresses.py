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
    "address", ["", "host", ":80", "host:", "host:http", "host:65536", "host:-1", "unix:", "unix:/" + "x" * 107]
)
def test_unusable_addresses_say_what_to_write(address: str) -> None:
    with pytest.raises(MeshError, match=r"host:port|107 bytes") as refusal:
        parse_address(address)
    assert refusal.value.reason_name == "INVALID_ARGUMENT"


def test_host_and_port_of_ipv6() -> None:
    assert split_host_port("[::1]:80") == ("::1", 80)
