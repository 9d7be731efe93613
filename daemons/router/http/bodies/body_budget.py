"""The memory of all request bodies that are being read or parsed at once."""

from __future__ import annotations

from types import TracebackType
from typing import Self

# Bodies up to here find room when large ones have taken all of theirs.
_SMALL_BYTES = 32 << 10
_LARGE_SHARE = 0.75


class BodyBudget:
    """max_bytes: of all bodies; large ones take at most three quarters of it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are held now."""
        return self._num_bytes

    def share(self) -> BodyShare:
        """One body's part, nothing at first: a context manager that gives it back."""
        return BodyShare(self)

    def add(self, num_bytes: int, *, is_large: bool) -> bool:
        """False, and nothing is taken, where that is too much."""
        most = self._max_bytes * _LARGE_SHARE if is_large else self._max_bytes
        if num_bytes > 0 and self._num_bytes + num_bytes > most:
            return False
        self._num_bytes += num_bytes
        return True


class BodyShare:
    """num_bytes: taken by this body."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Room for so many more; False where there is none."""
        if not self._budget.add(num_bytes, is_large=self.num_bytes + num_bytes > _SMALL_BYTES):
            return False
        self.num_bytes += num_bytes
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.add(-self.num_bytes, is_large=False)
        self.num_bytes = 0
