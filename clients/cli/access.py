"""Access of a verb to a mesh that asks for it: API key and files of TLS, by flags or environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from radixmesh.daemons.runtime.security.tls_files import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """api_key: empty = none is sent."""

    api_key: str = ""
    tls: TlsFiles = TlsFiles()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def add_access_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """--api-key-file and the files of TLS. A key itself is no flag: every user of a machine can read those."""
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its first word is the key; default: RADIXMESH_API_KEY"
    )
    parser.add_argument(
        "--tls-ca-file", type=Path, metavar="FILE", help="authorities of the mesh: talk TLS (RADIXMESH_TLS_CA_FILE)"
    )
    parser.add_argument(
        "--tls-cert-file", type=Path, metavar="FILE", help="certificate of this client (RADIXMESH_TLS_CERT_FILE)"
    )
    parser.add_argument("--tls-key-file", type=Path, metavar="FILE", help="its key (RADIXMESH_TLS_KEY_FILE)")
    parser.add_argument(
        "--tls-peer-name", metavar="NAME", help="name in the mesh's certificates (RADIXMESH_TLS_PEER_NAME)"
    )


def access_of(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Access:
    """Access from flags, or else the environment. Raises OSError or ValueError for a key file that has no key."""
    environ = os.environ if environ is None else environ
    given = {
        name: getattr(options, f"tls_{name}")
        for name in ("ca_file", "cert_file", "key_file", "peer_name")
        if getattr(options, f"tls_{name}") is not None
    }
    return Access(
        api_key=_key_of(options.api_key_file, environ), tls=replace(TlsFiles.from_environment(environ), **given)
    )


def access_from_environment(environ: Mapping[str, str] | None = None) -> Access:
    """As access_of(), for verbs without these flags."""
    environ = os.environ if environ is None else environ
    return Access(api_key=_key_of(None, environ), tls=TlsFiles.from_environment(environ))


def _key_of(path: Path | None, environ: Mapping[str, str]) -> str:
    named = environ.get("RADIXMESH_API_KEY_FILE")
    if path is None and named:
        path = Path(named)
    if path is None:
        return environ.get("RADIXMESH_API_KEY", "").strip()
    words = path.read_text().split()
    if not words:
        raise ValueError(f"{path} has no API key")
    return words[0]
