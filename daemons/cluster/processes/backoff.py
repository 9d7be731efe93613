"""Back-off: the wait before a process that ended is started again."""


class RestartBackoff:
    """Doubles the pause from `initial_s` to `max_s`, and starts over once a run has been healthy for `stable_s`.

    The first restart comes fast because a lone death is to be mended at once; a crash loop soon costs next to nothing.
    """

    def __init__(
        self, *, initial_s: float = 0.1, max_s: float = 5.0, factor: float = 2.0, stable_s: float = 1.0
    ) -> None:
        assert 0 < initial_s <= max_s and factor > 1, (initial_s, max_s, factor)
        self._initial_s = initial_s
        self._max_s = max_s
        self._factor = factor
        self._stable_s = stable_s
        self._next_s = initial_s

    def pause_after(self, healthy_s: float) -> float:
        """Returns the pause in seconds after a run that was healthy for `healthy_s` seconds (0: never)."""
        if healthy_s >= self._stable_s:
            self._next_s = self._initial_s
        pause_s = self._next_s
        self._next_s = min(self._max_s, pause_s * self._factor)
        return pause_s
