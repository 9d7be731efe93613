"""Spans of entries, from Open to close."""

from __future__ import annotations

from collections.abc import Iterable

from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable
from radixmesh.daemons.runtime.detokenize.messages import OpenEntry
from radixmesh.daemons.runtime.telemetry.tracing import Span, Tracer


class EntryTraces:
    """The traced entries of one stream; costs nothing for the others."""

    def __init__(self, tracer: Tracer, table: DecoderTable) -> None:
        self._tracer = tracer
        self._table = table
        self._spans: dict[int, Span] = {}

    def opened(self, opens: Iterable[OpenEntry]) -> None:
        """Before the table opens them."""
        for entry in opens:
            if entry.trace_context:
                self.closed((entry.handle,))
                self._spans[entry.handle] = self._tracer.begin(
                    "detokenizer.entry",
                    entry.trace_context,
                    {
                        "radixmesh.request_id": entry.request_id,
                        "radixmesh.replayed_len": len(entry.output_ids),
                    },
                )

    def closed(self, handles: Iterable[int]) -> None:
        """Before the table closes them."""
        if not self._spans:
            return
        for handle in handles:
            span = self._spans.pop(handle, None)
            if span is not None:
                num_tokens = self._table.num_tokens(handle)
                span.end({} if num_tokens is None else {"radixmesh.output_len": num_tokens})

    def cleared(self) -> None:
        """Before the table drops what is left: the stream is over."""
        self.closed(tuple(self._spans))
