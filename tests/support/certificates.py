"""Certificates for tests, made by the recipe of the documentation."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from radixmesh.daemons.runtime.tls_files import TlsFiles

_PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def make_certificates(folder: Path) -> Path:
    """An authority and certificates of all daemons and a client in the folder, which is made. Skips without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by openssl, which is not installed")
    found = re.search(r"```sh\n(umask.*?)```", _PAGE.read_text(), re.DOTALL)
    assert found is not None, "docs/security.md has lost its recipe"
    folder.mkdir(parents=True)
    done = subprocess.run(["sh", "-euc", found[1]], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def tls_of(folder: Path, name: str, *, asks_clients: bool = False) -> TlsFiles:
    """What daemon or client `name` has."""
    return TlsFiles(
        cert_file=folder / f"{name}.pem",
        key_file=folder / f"{name}.key",
        ca_file=folder / "ca.pem",
        client_ca_file=folder / "ca.pem" if asks_clients else None,
    )


def tls_settings(files: TlsFiles) -> dict[str, object]:
    """The same as settings of a daemon."""
    named = {
        "tls_cert_file": files.cert_file,
        "tls_key_file": files.key_file,
        "tls_ca_file": files.ca_file,
        "tls_client_ca_file": files.client_ca_file,
    }
    return {name: path for name, path in named.items() if path is not None}
