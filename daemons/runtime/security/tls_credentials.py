"""TLS files as grpc takes them. A server looks for changed files at every handshake: they are renewed in place."""

from __future__ import annotations

import grpc

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files. Raises MeshError naming a file that cannot be used."""
    return _FollowedFiles(files).credentials()


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """The files as they are now. Raises MeshError naming one that cannot be used."""
    files.client_context()  # grpc would say of broken files only that no connection comes about.
    assert files.ca_file is not None
    authorities = files.ca_file.read_bytes()
    if files.cert_file is None or files.key_file is None:
        return grpc.ssl_channel_credentials(authorities)
    return grpc.ssl_channel_credentials(authorities, files.key_file.read_bytes(), files.cert_file.read_bytes())


class _FollowedFiles:
    """grpc asks once a handshake, from a thread of its own."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self._configuration = self._read()
        self._asks_clients = files.client_ca_file is not None

    def credentials(self) -> grpc.ServerCredentials:
        # The stub of grpc does not know that None is an answer.
        return grpc.dynamic_ssl_server_credentials(self._configuration, self._next, self._asks_clients)  # type: ignore[arg-type]

    def _next(self) -> grpc.ServerCertificateConfiguration | None:
        """None = as before. Files that are half replaced stay unused until they fit each other."""
        stamp = self._files.stamp()
        if stamp != self._stamp:
            try:
                self._configuration = self._read()
            except (MeshError, OSError) as error:
                log.warning("certificates_not_reloaded", error=str(error))
            else:
                self._stamp = stamp
                log.info("certificates_reloaded", cert_file=self._files.cert_file)
                return self._configuration
        # A session that is resumed shows no certificate: it would outlive the certificate, and its authority here. grpc
        # has no switch for it, but sessions of one configuration mean nothing to the next.
        return self._configuration if self._asks_clients else None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        files.server_context()  # Checks them, and that they belong together.
        assert files.cert_file is not None and files.key_file is not None
        authorities = files.client_ca_file.read_bytes() if files.client_ca_file is not None else None
        chain = [(files.key_file.read_bytes(), files.cert_file.read_bytes())]
        return grpc.ssl_server_certificate_configuration(chain, authorities)
