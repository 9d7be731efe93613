"""Keys and TLS files of the command line: where it finds them, and to whom it shows which key."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixmesh.cli.access import Access, access_of
from radixmesh.cli.bench.serve import target_options
from radixmesh.cli.bench.serve_flags import serve_parser

MESH, WEB = "grpc://127.0.0.1:1", "https://api.example.com/v1"


def access(arguments: list[str], **environ: str) -> Access:
    return access_of(serve_parser().parse_args(arguments), environ)


def test_flags_go_before_variables(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-the-flag and a comment\n")
    (tmp_path / "empty").write_text("\n")
    assert access([]) == Access() and access([]).metadata == ()
    assert access([], RADIXMESH_API_KEY=" plain ").metadata == (("authorization", "Bearer plain"),)
    variables = {"RADIXMESH_API_KEY": "plain", "RADIXMESH_TLS_CA_FILE": "/ca", "RADIXMESH_TLS_PEER_NAME": "mesh"}
    given = access(["--api-key-file", str(tmp_path / "key"), "--tls-ca-file", "/mine"], **variables)
    assert given.api_key == "of-the-flag"
    assert (given.tls.ca_file, given.tls.peer_name, given.tls.cert_file) == (Path("/mine"), "mesh", None)
    assert access([], RADIXMESH_API_KEY_FILE=str(tmp_path / "key")).api_key == "of-the-flag"
    with pytest.raises(ValueError, match="has no API key"):
        access(["--api-key-file", str(tmp_path / "empty")])
    with pytest.raises(FileNotFoundError):
        access(["--api-key-file", str(tmp_path / "nowhere")])


def test_a_key_goes_only_to_whom_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXMESH_API_KEY", "mesh-key")
    monkeypatch.setenv("OPENAI_API_KEY", "web-key")
    (tmp_path / "key").write_text("file-key")

    def sent(address: str, *arguments: str) -> str:
        return target_options(serve_parser().parse_args(arguments), address).api_key

    assert (sent(MESH), sent(WEB)) == ("mesh-key", "web-key")
    for arguments in (["--api-key", "given"], ["--api-key", "given", "--api-key-file", str(tmp_path / "key")]):
        assert sent(MESH, *arguments) == sent(WEB, *arguments) == "given"
    assert sent(MESH, "--api-key-file", str(tmp_path / "key")) == sent(WEB, "--api-key-file", str(tmp_path / "key"))
    assert sent(WEB, "--api-key-file", str(tmp_path / "key")) == "file-key"
