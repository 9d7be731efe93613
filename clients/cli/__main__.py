"""`radixmesh <verb> ...`: finds the verb, imports it, and turns its errors into a message and an exit code."""

import importlib
import sys

import radixmesh

_VERBS = {
    "serve": "serve a model of yours on this machine: a folder, or a name on the hub",
    "up": "start the services of a compose file as local processes",
    "down": "stop a cluster that 'up' started",
    "status": "show every daemon of a cluster: health, address, restarts, epoch, load",
    "generate": "complete a prompt or answer a chat message, streamed",
    "chat": "chat in the terminal",
    "bench": "measure a mesh, or any OpenAI server, under load",
    "logs": "show what the daemons of a cluster have logged",
    "move": "let running outputs go on at another scheduler",
    "replica": "add a scheduler to running routers, or remove one",
    "role": "let a running scheduler take another part in disaggregated prefill and decode",
    "transfers": "show the KV transfers of a worker, and free staging of a writer that is gone",
    "roll": "replace the daemons of a running cluster one by one, while it serves",
    "health": "ask one daemon whether it serves; for health checks",
    "completion": "print the completion of a shell: bash, zsh or fish",
}
_DAEMONS = ("tokenizer", "detokenizer", "worker", "scheduler", "router", "front")
_EXIT_USAGE = 2


def main() -> int:
    """Runs the verb in sys.argv and returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    verb, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if verb in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if verb in ("-V", "--version", "version"):
        print(f"radixmesh {radixmesh.__version__}")
        return 0
    try:
        if verb in _DAEMONS:
            return _run_daemon(verb, arguments)
        if verb in _VERBS:
            module = importlib.import_module(f"radixmesh.cli.{verb}")
            return int(module.run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain about it once more when it closes stdout.
        sys.stderr.close()
        return 1
    print(f"radixmesh: there is no verb {verb!r}\n\n{_usage()}", file=sys.stderr)
    return _EXIT_USAGE


def all_verbs() -> tuple[str, ...]:
    """Everything that may follow `radixmesh`."""
    return (*_VERBS, *_DAEMONS)


def _run_daemon(name: str, arguments: list[str]) -> int:
    # Daemons read their flags from sys.argv, as they do under `python -m`.
    sys.argv = [f"radixmesh {name}", *arguments]
    return int(importlib.import_module(f"radixmesh.daemons.{name}.__main__").main() or 0)


def _usage() -> str:
    verbs = "\n".join(f"  {verb:<12} {text}" for verb, text in _VERBS.items())
    daemons = "\n".join(f"  {name:<12} run one {name} (see radixmesh {name} --help)" for name in _DAEMONS)
    return f"usage: radixmesh <verb> ... (radixmesh <verb> --help for its flags)\n\n{verbs}\n\n{daemons}"


if __name__ == "__main__":
    sys.exit(main())
