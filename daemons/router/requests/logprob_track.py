"""Logprobs of one output that no client has yet."""

from __future__ import annotations

from radixmesh.daemons.router.requests.updates import Logprobs
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError


class LogprobTrack:
    """Values of consecutive positions, `start` to `end` (exclusive): appended at the end, taken from the start."""

    __slots__ = ("_num_added", "_num_top", "_token_logprobs", "_top_ids", "_top_logprobs", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self._num_added = 0
        self._num_top = 0
        self._token_logprobs = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    @property
    def end(self) -> int:
        return self.start + len(self._token_logprobs) // 4

    @property
    def num_bytes(self) -> int:
        return len(self._token_logprobs) + len(self._top_ids) + len(self._top_logprobs)

    @property
    def token_bytes(self) -> int:
        """Bytes of one position's values."""
        return 4 + 8 * self._num_top

    def take_added(self) -> int:
        """Bytes by which it has grown since the last call, for who accounts for them; what take() removed apart."""
        num_added, self._num_added = self._num_added, 0
        return num_added

    def append(self, logprobs: Logprobs) -> None:
        """Adds the values that follow. Raises MALFORMED_MESSAGE if the arrays do not fit each other or those before."""
        count, rest = divmod(len(logprobs.token_logprobs), 4)
        size = 4 * count * logprobs.num_top
        is_same_width = not self._token_logprobs or logprobs.num_top == self._num_top
        if rest or len(logprobs.top_ids) != size or len(logprobs.top_logprobs) != size or not is_same_width:
            message = f"logprobs of {count} tokens with {logprobs.num_top} alternatives do not fit their arrays"
            raise MeshError(ErrorReason.ERROR_REASON_MALFORMED_MESSAGE, message, {"field": "logprobs"})
        self._num_top = logprobs.num_top
        self._token_logprobs += logprobs.token_logprobs
        self._top_ids += logprobs.top_ids
        self._top_logprobs += logprobs.top_logprobs
        self._num_added += count * self.token_bytes

    def cut(self, end: int) -> None:
        """Removes the values from output index `end` on."""
        count = max(0, end - self.start)
        before = self.num_bytes
        size = 4 * count * self._num_top
        del self._token_logprobs[4 * count :], self._top_ids[size:], self._top_logprobs[size:]
        self._num_added -= before - self.num_bytes

    def take(self, end: int) -> Logprobs:
        """Removes and returns the values before output index `end`."""
        count = max(0, min(end, self.end) - self.start)
        size = 4 * count * self._num_top
        taken = Logprobs(
            token_logprobs=bytes(self._token_logprobs[: 4 * count]),
            num_top=self._num_top,
            top_ids=bytes(self._top_ids[:size]),
            top_logprobs=bytes(self._top_logprobs[:size]),
        )
        del self._token_logprobs[: 4 * count], self._top_ids[:size], self._top_logprobs[:size]
        self.start += count
        return taken
