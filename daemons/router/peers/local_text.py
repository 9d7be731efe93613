"""The served model's vocabulary in this process: short prompts become ids, and few outputs text, with no call.

A message to a tokenizer or detokenizer wakes two threads there and two here, each way. What is short and cheap costs
less than that on the event loop; all else, and all that goes wrong here, is for the daemons, as if this were not there.

OFF --load()--> READY --an encoding took too long, or failed--> resting (a while) --> READY
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget
from radixmesh.daemons.runtime.detokenize.decoder_table import Limits as EntryLimits
from radixmesh.daemons.runtime.detokenize.text_decoder import DecoderFamily, family_of
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.encode_request import SHORT_BYTES, encode_request
from radixmesh.daemons.runtime.tokenize.text_codec import Limits, TextCodec, run_whole
from radixmesh.tokenizer.v1 import tokenizer_pb2

log = get_logger(__name__)

# Reading a model folder takes the interpreter's lock for some tenths of a second: not while clients whose
# router died come here to resume.
LOAD_AFTER_S = 3.0
# Of a text or a rendered chat, UTF-8 bytes: 1.5 ms of the event loop.
_MAX_TEXT_BYTES = 8 << 10
# CPU seconds of a chat template, and of an encoding with all around it, beyond which there is a rest.
_MAX_RENDER_S, _MAX_ENCODE_S = 0.005, 0.01
_REST_S = 60.0
# Of the event loop's time, and seconds of it at once: encoding many prompts is what tokenizers have cores for.
_SHARE, _BURST_S = 0.25, 0.05
# Of one output here, by which a frame of its tokens takes no time that others would notice.
_MAX_STOPS, _MAX_STOP_BYTES, _MAX_REPLAYED = 8, 128, 1024


class LocalText:
    """Encodes and makes tables of decoders once load() is over. fingerprints: those of the tokenizers of all served
    models, "" = not told; unless there are some, and all are this one's, a request is for the daemons. on_encoded:
    called per answer. clock: monotonic seconds. cpu_clock: seconds that this thread has run: a busy machine interrupts
    an encoding for longer than it takes."""

    def __init__(
        self,
        folder: Path,
        fingerprints: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
        on_encoded: Callable[[], object] = lambda: None,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._folder = folder
        self._fingerprints = fingerprints
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._on_encoded = on_encoded
        self._codec: TextCodec | None = None
        self._family: DecoderFamily | None = None
        self._rests_until_s = 0.0
        # Seconds of encoding that are not made up for yet, as of the last one.
        self._spent_s, self._spent_at_s = 0.0, 0.0

    @property
    def vocabulary(self) -> Vocabulary | None:
        return None if self._codec is None else self._codec.vocabulary

    async def load(self) -> None:
        """Reads the folder. Nothing ends because of what is wrong with it: the log says so."""
        started = self._clock()
        try:
            self._codec, self._family = await asyncio.to_thread(self._read)
        except Exception as error:
            log.warning("text_not_local", folder=str(self._folder), reason=f"{type(error).__name__}: {error}")
            return
        # Hundreds of thousands of strings, which live as long as the process does.
        gc.freeze()
        log.info("text_local", folder=str(self._folder), seconds=round(self._clock() - started, 3))

    def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse | None:
        """The answer of a tokenizer; None: ask one. Takes milliseconds at most, and fails in no way."""
        codec, since_s = self._codec, self._clock()
        if codec is None or since_s < self._rests_until_s or request.ByteSize() > SHORT_BYTES:
            return None
        self._spent_s = max(0.0, self._spent_s - _SHARE * (since_s - self._spent_at_s))
        self._spent_at_s = since_s
        if self._spent_s > _BURST_S:
            return None
        fingerprint, told = codec.vocabulary.fingerprint, tuple(self._fingerprints())
        # Until a scheduler has said what is served, a tokenizer may know better which vocabulary that is.
        if not told or any(other and other != fingerprint for other in told):
            return None
        begun_s = self._cpu_clock()
        try:
            answer = run_whole(encode_request(lambda: codec, request))
        except MeshError:
            return None  # Of the request as a whole, before any work: a tokenizer says so.
        # A panic of the library is no Exception. Cancelled this cannot be: it waits for nothing.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._rest(f"{type(error).__name__}: {error}")
            return None
        took_s = self._cpu_clock() - begun_s
        self._spent_s += took_s
        if took_s > _MAX_ENCODE_S:
            self._rest(f"{took_s:.3f} s for {request.ByteSize()} bytes")
        too_large = ErrorReason.ERROR_REASON_TOO_LARGE
        if any(item.HasField("error") and item.error.reason == too_large for item in answer.items):
            # The bounds here are lower than a tokenizer's. A template that reaches them costs as much the next time.
            self._rest("a template makes long texts, or takes long")
            return None
        self._on_encoded()
        return answer

    def new_table(self, num_entries: int) -> DecoderTable:
        """Decoders of so many outputs."""
        assert self._family is not None and self._codec is not None
        vocabulary = self._codec.vocabulary
        limits = EntryLimits(max_output_tokens=vocabulary.identity.max_total_len or EntryLimits().max_output_tokens)
        return DecoderTable(self._family, vocabulary.vocab_size, limits, EntryBudget(num_entries))

    def _read(self) -> tuple[TextCodec, DecoderFamily]:
        before = _state_of(self._folder)
        vocabulary = Vocabulary.load(self._folder)
        limits = Limits(max_text_bytes=_MAX_TEXT_BYTES, max_render_s=_MAX_RENDER_S)
        codec = TextCodec(vocabulary, ChatTemplate.load(self._folder), limits)
        if _state_of(self._folder) != before:
            # The fingerprint may be that of files that are gone, and the ids those of others.
            raise RuntimeError("the folder changed while it was read: start this router again")
        return codec, family_of(vocabulary)

    def _rest(self, reason: str) -> None:
        self._rests_until_s = self._clock() + _REST_S
        log.info("local_text_rests", seconds=_REST_S, reason=reason)


def _state_of(folder: Path) -> list[tuple[str, int, int, int]]:
    """Names, inodes, sizes and times of a folder's files of text."""
    files = sorted(path for pattern in ("**/*.json", "**/*.jinja") for path in folder.glob(pattern))
    return [(str(path), (stat := path.stat()).st_ino, stat.st_size, stat.st_mtime_ns) for path in files]


def is_cheap(num_replayed: int, stops: Iterable[str]) -> bool:
    """True for an output that may be decoded on the event loop."""
    stops = tuple(stops)
    are_short = all(len(stop) <= _MAX_STOP_BYTES for stop in stops)
    return num_replayed <= _MAX_REPLAYED and len(stops) <= _MAX_STOPS and are_short
