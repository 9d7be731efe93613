"""Runs a command that the kernel kills when the process that started it dies, however it dies.

    python die_with_parent.py <parent pid> <command> [arguments ...]

It asks the kernel for SIGKILL at the parent's death (PR_SET_PDEATHSIG, which survives exec) and becomes the command. A
file of its own, run without site packages, because a hook between fork and exec is not safe in a process with threads.
The kernel means the parent's *thread*: whoever starts daemons must do so from a thread that lives as long as they may.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_EXIT_NOT_FOUND = 127


def main() -> None:
    """Never returns: becomes the command, or exits with 127 if there is no such command."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if (
        sys.platform == "linux"
        and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0
    ):
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        # The parent died before the request was made; nobody would ever send the signal.
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}; is it installed and on PATH?\n")
        sys.exit(_EXIT_NOT_FOUND)


if __name__ == "__main__":
    main()
