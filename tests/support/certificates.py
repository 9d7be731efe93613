"""Certificates for tests, made by the script of the documentation."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from radixmesh.daemons.runtime.security.tls_files import TlsFiles

# Others than daemons that are let in.
_CLIENT_CA = {"router": "router-clients.pem"}
_SCRIPT = Path(__file__).parents[2] / "compose" / "make_certificates.sh"


def make_certificates(folder: Path) -> Path:
    """Authorities, and certificates of all daemons and a client, in the folder. Skips without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by openssl, which is not installed")
    done = subprocess.run([str(_SCRIPT), str(folder)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def tls_of(folder: Path, name: str, *, asks_clients: bool = False) -> TlsFiles:
    """Files of daemon or client `name`."""
    return TlsFiles(
        cert_file=folder / f"{name}.pem",
        key_file=folder / f"{name}.key",
        ca_file=folder / "ca.pem",
        client_ca_file=folder / _CLIENT_CA.get(name, "ca.pem") if asks_clients else None,
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
