"""Domain code of the daemons knows no grpc: only the servers (service.py and the like) and the runtime do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DAEMONS = Path(__file__).parents[2] / "daemons"
_IMPORTS = re.compile(r"^\s*(import grpc|from grpc|from \S+ import .*_pb2_grpc)", re.MULTILINE)
# The gRPC server of each daemon, and what puts a daemon together.
_SERVERS = ("*service.py", "__main__.py", "daemon.py", "composition.py", "grpc_peers.py")


@pytest.mark.parametrize("daemon", ["scheduler", "worker", "router", "tokenizer", "detokenizer"])
def test_only_the_edges_import_grpc(daemon: str) -> None:
    files = [path for path in (DAEMONS / daemon).rglob("*.py") if not any(path.match(server) for server in _SERVERS)]
    found = [str(path.relative_to(DAEMONS)) for path in files if _IMPORTS.search(path.read_text())]
    assert files and not found
