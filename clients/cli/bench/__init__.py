"""`radixmesh bench <what> ...`: finds the bench and imports it."""

from __future__ import annotations

import importlib
import sys

_BENCHES = {
    "offline-throughput": "tokens a second with all requests there from the start",
    "one-batch": "time batches of equal requests: prefill, decode",
    "scheduler": "replay a workload against the planner with the simulated worker, in virtual time",
    "serve": "send a workload to a running mesh and measure what its clients see",
}
# Module and function, where they are not `<name>.run`.
_MODULES = {
    "offline-throughput": ("offline", "run_offline_throughput"),
    "one-batch": ("offline", "run_one_batch"),
}
_EXIT_USAGE = 2


def run(arguments: list[str]) -> int:
    """Runs the bench that the first argument names; its exit code, 2 for one that there is not."""
    name, rest = (arguments[0] if arguments else "--help"), arguments[1:]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name in _BENCHES:
        module_name, verb = _MODULES.get(name, (name, "run"))
        module = importlib.import_module(f"radixmesh.cli.bench.{module_name}")
        return int(getattr(module, verb)(rest))
    print(f"radixmesh bench: there is no bench {name!r}\n\n{_usage()}", file=sys.stderr)
    return _EXIT_USAGE


def _usage() -> str:
    benches = "\n".join(f"  {name:<20} {text}" for name, text in _BENCHES.items())
    return f"usage: radixmesh bench <what> ... (radixmesh bench <what> --help for its flags)\n\n{benches}"
