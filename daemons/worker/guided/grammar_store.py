"""Grammars ready to be followed, by the hash of their blobs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import CompiledGrammar, GrammarBackend, GreedyTokens
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

# Memory of grammars that no slot follows any more; those of slots live as long as these.
MAX_BYTES = 256 << 20


class GrammarStore:
    """Any thread may call. make_backend: imports the library and sorts the vocabulary, which takes seconds: at
    prepare(), otherwise at the first grammar.

    format: of the artefacts that it reads, "" = none, the library is not installed here.
    """

    def __init__(
        self, grammar_format: str, make_backend: Callable[[], GrammarBackend], max_bytes: int = MAX_BYTES
    ) -> None:
        self.format = grammar_format
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        # The step thread, which asks for what is there, does not wait for a grammar that is being read.
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def prepare(self) -> None:
        """Makes the library ready before the worker serves.

        Guided outputs that move here from another worker would stall for its import, and all others with them while it
        holds the interpreter: 9 s on a busy machine.
        """
        with self._reading:
            if self._backend is not None:
                return
            started = time.monotonic()
            try:
                self._backend = self._make_backend()
            except MeshError as error:
                # Requests that need it are told so; all others can be served.
                log.warning("grammars_not_ready", error=str(error))
            else:
                log.info("grammars_ready", seconds=round(time.monotonic() - started, 3))

    def is_grammar(self, blob: bytes) -> bool:
        """True for a blob that says it is one, of whatever version."""
        name = self.format.partition("/")[0]
        return bool(name) and blob.startswith(f"{name}/".encode())

    @property
    def tokens(self) -> GreedyTokens:
        """Of the vocabulary; there once a grammar was read."""
        assert self._backend is not None
        return self._backend.tokens

    def get(self, blob_hash: str, blob: bytes) -> CompiledGrammar:
        """The grammar of a blob, read when it is first asked for. Raises INVALID_GRAMMAR, UNSUPPORTED."""
        found = self._known(blob_hash)
        if found is not None:
            return found
        with self._reading:
            found = self._known(blob_hash)  # Another thread may have read it meanwhile.
            if found is not None:
                return found
            if self._backend is None:
                self._backend = self._make_backend()
            grammar = self._backend.load(blob)
            self._keep(blob_hash, grammar)
            return grammar

    def _known(self, blob_hash: str) -> CompiledGrammar | None:
        with self._lock:
            found = self._grammars.get(blob_hash)
            if found is not None:
                self._grammars.move_to_end(blob_hash)
            return found

    def _keep(self, blob_hash: str, grammar: CompiledGrammar) -> None:
        with self._lock:
            self._grammars[blob_hash] = grammar
            self._num_bytes += grammar.num_bytes
            while self._num_bytes > self._max_bytes and len(self._grammars) > 1:
                _, dropped = self._grammars.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
