"""Errors between a compose file and running processes. Every message says what to do about it."""


class ClusterError(Exception):
    """Base of all errors that a user of the local cluster can cause or cure."""


class ComposeError(ClusterError):
    """The compose file cannot be read as one that local processes can follow.

    `where` is the dotted path of the offending value (`services.router.ports[0]`).
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}" if where else problem)
        self.where = where
        self.problem = problem


class UnsupportedKeyError(ComposeError):
    """A key that changes what runs and that local processes do not honour: refused, never silently dropped."""


class DependencyCycleError(ComposeError):
    """Services wait for one another in a circle, so none could ever start."""


class UnknownServiceError(ClusterError):
    """A service or replica that the compose file does not have."""


class PortTakenError(ClusterError):
    """A published port is in use by something else."""


class AlreadyRunningError(ClusterError):
    """Another supervisor holds the run directory of this project."""


class UntrustedFolderError(ClusterError):
    """A run folder that another user made, or can write: nothing in it is believed."""


class NotRunningError(ClusterError):
    """No running cluster was found where one was looked for."""


class StartTimeoutError(ClusterError):
    """The cluster did not become healthy in time; the message lists who was not and what it last printed."""


class NoRestartCuresError(ClusterError):
    """A daemon refuses to start for a reason that stays: its settings, its model, its device, a file."""


class SpawnError(ClusterError):
    """The operating system would not start a service's command."""


class RollRefusedError(ClusterError):
    """A roll that cannot begin: nothing was done."""


class RollAbortedError(ClusterError):
    """A roll that ended early: the message says why, what was replaced, and what serves."""
