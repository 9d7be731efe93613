"""HTTP under TLS, by files that may be replaced while the server runs."""

from __future__ import annotations

import ssl

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)


class FollowedContext:
    """The context of the files as they are now, for the next handshake. A session of a former context is not resumed
    in the next one."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises MeshError naming a file that cannot be used."""
        self._files = files
        self._stamp = files.stamp()
        self._current = files.server_context()

    def current(self) -> ssl.SSLContext:
        """Files that are half replaced stay unused until they fit each other."""
        stamp = self._files.stamp()
        if stamp != self._stamp:
            try:
                self._current = self._files.server_context()
            except MeshError as error:
                log.warning("certificates_not_reloaded", error=str(error))
            else:
                self._stamp = stamp
                log.info("certificates_reloaded", cert_file=self._files.cert_file)
        return self._current
