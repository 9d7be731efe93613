"""The entries of one stream: decode states by handle.

    (none) --open--> decoding --stop, EOS, last row--> final --close--> (none)
       ^                |                                |
       +---failure------+--------------close-------------+
A final entry stays until it is closed, without text: tokens that were on their way are ignored, not reported lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, OpenEntry, TextDelta, TokenBatch
from radixmesh.daemons.runtime.detokenize.output_decoder import OutputDecoder
from radixmesh.daemons.runtime.detokenize.stop_finder import StopSet
from radixmesh.daemons.runtime.detokenize.text_decoder import DecoderFamily
from radixmesh.daemons.runtime.errors import MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one entry. max_stop_bytes: UTF-8 bytes of one stop string."""

    max_stops: int = 64
    max_stop_bytes: int = 1024
    max_output_tokens: int = 1 << 20


class EntryBudget:
    """Counts the entries of all tables of a daemon."""

    __slots__ = ("max_entries", "num_entries")

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.num_entries = 0

    def require_room(self) -> None:
        """Raises MeshError OVERLOADED when all are taken."""
        if self.num_entries >= self.max_entries:
            message = f"all {self.max_entries} entries are in use: close some, or open this one on another replica"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000"})

    def take(self) -> None:
        self.num_entries += 1

    def give_back(self, num: int = 1) -> None:
        self.num_entries -= num
        assert self.num_entries >= 0, self.num_entries


class DecoderTable:
    """Entries by handle. Nothing that a caller sends raises: what is wrong with an entry fails that entry alone."""

    def __init__(self, family: DecoderFamily, vocab_size: int, limits: Limits, budget: EntryBudget) -> None:
        self._family = family
        self._vocab_size = vocab_size
        self._limits = limits
        self._budget = budget
        self._entries: dict[int, OutputDecoder] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, entry: OpenEntry) -> TextDelta | EntryFailure | None:
        """Creates an entry, or anew where the handle exists. None where nothing has been output yet."""
        self._drop(entry.handle)
        try:
            self._budget.require_room()
        except MeshError as error:
            return EntryFailure(entry.handle, True, error)
        try:
            decoder = self._new_decoder(entry)
            text = decoder.resume(entry.output_ids, entry.emitted_text_bytes)
        except MeshError as error:
            return _failure_of(entry.handle, error)
        self._budget.take()
        self._entries[entry.handle] = decoder
        if not entry.output_ids:
            return None
        offset = entry.emitted_text_bytes
        return TextDelta(entry.handle, offset, text, decoder.num_tokens, decoder.stop, decoder.is_final)

    def push(self, batch: TokenBatch) -> tuple[list[TextDelta], list[EntryFailure]]:
        """Decodes new tokens; deltas and failures are in the order of the rows. The hot path: once per frame."""
        deltas: list[TextDelta] = []
        failures: list[EntryFailure] = []
        entries = self._entries
        are_ids_inside = batch.min_id >= 0 and batch.max_id < self._vocab_size
        max_output_tokens = self._limits.max_output_tokens
        all_ids = batch.ids
        end = 0
        for handle, first, count, is_last in zip(
            batch.handles, batch.first_indexes, batch.counts, batch.finals, strict=True
        ):
            start, end = end, end + count
            decoder = entries.get(handle)
            if decoder is None or first > decoder.num_tokens:
                if decoder is None or not decoder.is_final:
                    failures.append(self._lost(handle, first))
                continue
            if decoder.is_final:
                continue
            start += decoder.num_tokens - first  # Tokens seen before; none, as a rule.
            if start >= end and not is_last:
                continue
            ids, offset = all_ids[start:end], decoder.text_bytes
            try:
                if not are_ids_inside:
                    self._check_ids(ids, decoder.num_tokens)
                if decoder.num_tokens + len(ids) > max_output_tokens:
                    raise self._too_many_tokens()
                text = decoder.push(ids, bool(is_last))
            except MeshError as error:
                self._drop(handle)
                failures.append(_failure_of(handle, error))
                continue
            deltas.append(TextDelta(handle, offset, text, decoder.num_tokens, decoder.stop, decoder.is_final))
        return deltas, failures

    def num_tokens(self, handle: int) -> int | None:
        """Tokens of an entry that were seen; None = there is no such entry."""
        decoder = self._entries.get(handle)
        return None if decoder is None else decoder.num_tokens

    def close(self, handles: Iterable[int]) -> None:
        """Drops entries; handles that are not there are ignored."""
        for handle in handles:
            self._drop(handle)

    def clear(self) -> None:
        """Drops all entries: the stream is over."""
        self._budget.give_back(len(self._entries))
        self._entries.clear()

    def _new_decoder(self, entry: OpenEntry) -> OutputDecoder:
        stops = StopSet.checked(
            entry.stops, max_stops=self._limits.max_stops, max_stop_bytes=self._limits.max_stop_bytes
        )
        self._check_ids(entry.prompt_tail_ids, 0)
        self._check_ids(entry.output_ids, 0)
        if len(entry.output_ids) > self._limits.max_output_tokens:
            raise self._too_many_tokens()
        decoder = self._family.new_decoder(
            skip_special_tokens=entry.skip_special_tokens, prompt_tail_ids=entry.prompt_tail_ids
        )
        return OutputDecoder(decoder, stops=stops, eos_ids=frozenset(entry.eos_ids), include_stop=entry.include_stop)

    def _check_ids(self, ids: Sequence[int], first_position: int) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self._vocab_size):
            return
        index = next(index for index, i in enumerate(ids) if not 0 <= i < self._vocab_size)
        raise MeshError(
            ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY,
            f"token {ids[index]} is outside the vocabulary of {self._vocab_size}: check that both ends use one model",
            {
                "position": str(first_position + index),
                "id": str(ids[index]),
                "vocab_size": str(self._vocab_size),
            },
        )

    def _too_many_tokens(self) -> MeshError:
        limit = self._limits.max_output_tokens
        message = f"an output has at most {limit} tokens with this model"
        return MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"max": str(limit)})

    def _lost(self, handle: int, first: int) -> EntryFailure:
        decoder = self._entries.get(handle)
        if decoder is None:
            message = f"no entry {handle} on this stream: open it with all its output ids"
            return EntryFailure(handle, True, MeshError(ErrorReason.ERROR_REASON_UNKNOWN_REQUEST, message))
        message = f"entry {handle} has {decoder.num_tokens} tokens, the next ones start at {first}: open it again"
        self._drop(handle)
        return EntryFailure(handle, True, MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message))

    def _drop(self, handle: int) -> None:
        if self._entries.pop(handle, None) is not None:
            self._budget.give_back()


def _failure_of(handle: int, error: MeshError) -> EntryFailure:
    """Without the frames that the error went through: until it is read they hold what was sent, maybe a million ids."""
    return EntryFailure(handle, False, error.with_traceback(None))
