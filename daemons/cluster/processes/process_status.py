"""Status of one process at one moment, as the supervisor knows it."""

import enum
from dataclasses import dataclass


class ProcessState(enum.Enum):
    """
    WAITING --dependencies ready--> STARTING --serves--> HEALTHY <--> UNWELL
                                       ^  |                 |           |
                                       |  '---- dies or is killed for hanging ----.
                                       |                                          v
                                       '------------- pause over ------------- BACKOFF, or ENDED if not to be restarted
    any --stop--> STOPPED
    """

    WAITING = "waiting"
    STARTING = "starting"
    HEALTHY = "healthy"
    UNWELL = "unwell"
    BACKOFF = "backoff"
    ENDED = "ended"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """A snapshot; the supervisor replaces it at every change."""

    service: str
    replica: int
    state: ProcessState
    address: str | None
    """Its gRPC address; None for a service that listens nowhere."""
    pid: int | None
    """None while it does not run."""
    restarts: int
    """Starts after the first one."""
    detail: str
    """Why it is in this state, for a person to read."""
    started_at: float | None
    """Unix time of the last start, in seconds."""

    @property
    def name(self) -> str:
        """`router-1`."""
        return f"{self.service}-{self.replica}"
