"""Pushes a scheduler's load to its routers: regularly, and sooner when it changed."""

from __future__ import annotations

from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.routers.router_streams import RouterStreams

_LOAD_S = 0.5
# A load that changed is told at once, but no more often than that.
_LOAD_CHANGE_S = 0.05


class LoadPush:
    """Times are seconds of the caller's clock."""

    def __init__(self, planner: Planner, streams: RouterStreams, now: float) -> None:
        self._planner = planner
        self._streams = streams
        self._last_s = now
        self._told: tuple[int, ...] = ()

    def if_changed(self, now: float) -> None:
        if now - self._last_s >= _LOAD_CHANGE_S and self._signature() != self._told:
            # While outputs run, a frame of tokens is due within a step: the load goes with it, not by one of its own.
            self._push(now, is_urgent=not self._planner.num_running)

    def if_due(self, now: float) -> None:
        if now - self._last_s >= _LOAD_S:
            self._push(now)

    def _push(self, now: float, *, is_urgent: bool = True) -> None:
        self._last_s, self._told = now, self._signature()
        self._streams.push_loads(is_urgent=is_urgent)

    def _signature(self) -> tuple[int, ...]:
        """The part of the load that is pushed when it changes; pages, which change with every step, in 64ths."""
        planner = self._planner
        if planner.state is None:
            return (planner.num_running, planner.num_waiting)
        counts = planner.state.page_counts()
        num_pages = planner.state.num_pages
        pages = (64 * counts[kind] // num_pages for kind in (PageState.FREE, PageState.CACHED))
        return (planner.num_running, planner.num_waiting, *pages)
