"""The detokenizer as a process keeps it alive: the vocabulary's tables, and the count of entries of all streams."""

from __future__ import annotations

import asyncio
import time

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.detokenizer.config import DetokenizerSettings
from radixmesh.daemons.detokenizer.service import DetokenizerService
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.text_decoder import DecoderFamily, family_of
from radixmesh.daemons.runtime.lifecycle import Daemon, Runtime
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.rpc.hello import identity_to_proto, make_hello
from radixmesh.detokenizer.v1 import detokenizer_pb2_grpc

_DRAIN_POLL_S = 0.05
# New outputs wait where this is the only replica: what is left goes on at another one, or at the next process.
_ENTRIES_DRAIN_S = 2.0


class DetokenizerDaemon(Daemon):
    """Serves Detokenize once its tables are built."""

    def __init__(self, runtime: Runtime, settings: DetokenizerSettings) -> None:
        self._settings = settings
        self._instance_id = runtime.instance_id
        self._budget = EntryBudget(settings.max_entries)
        self._loaded: tuple[Vocabulary, DecoderFamily] | None = None
        runtime.metrics.detokenizer_entries.set_function(lambda: self._budget.num_entries)
        self.service = DetokenizerService(
            self, runtime.progress, settings.max_pending_bytes, runtime.metrics, runtime.tracer
        )
        runtime.server.add(detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server, self.service)

    @property
    def num_entries(self) -> int:
        """Outputs that are open, all streams together."""
        return self._budget.num_entries

    async def load(self) -> None:
        self._loaded = await asyncio.to_thread(self._load)

    async def drain(self) -> None:
        """Entries are a cache that any replica rebuilds: those that are open may finish for a moment only."""
        until = time.monotonic() + _ENTRIES_DRAIN_S
        while self._budget.num_entries and time.monotonic() < until:  # noqa: ASYNC110 - entries end in domain code.
            await asyncio.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        return

    def new_table(self) -> DecoderTable:
        assert self._loaded is not None, "streams are refused while loading"
        vocabulary, family = self._loaded
        limits = Limits(
            max_stops=self._settings.max_stops,
            max_stop_bytes=self._settings.max_stop_bytes,
            max_output_tokens=vocabulary.identity.max_total_len or self._settings.max_output_tokens,
        )
        return DecoderTable(family, vocabulary.vocab_size, limits, self._budget)

    def hello(self) -> common_pb2.Hello:
        assert self._loaded is not None, "streams are refused while loading"
        vocabulary = self._loaded[0]
        model = identity_to_proto(vocabulary.identity, tokenizer_fingerprint=vocabulary.fingerprint)
        return make_hello(self._instance_id, "detokenizer", model)

    def _load(self) -> tuple[Vocabulary, DecoderFamily]:
        vocabulary = Vocabulary.load(self._settings.model)
        return vocabulary, family_of(vocabulary)
