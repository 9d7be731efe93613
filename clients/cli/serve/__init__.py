"""`radixmesh serve`: a whole local mesh on one's own model, in one command."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from radixmesh.cli import up
from radixmesh.cli.serve.model_check import (
    CheckedModel,
    ModelCheckError,
    available_memory,
    check_model,
    choose_cpu_dtype,
    count_gpus,
)
from radixmesh.cli.serve.model_source import ModelSourceError, find_model_folder, served_name
from radixmesh.cli.terminal import Terminal

COMPOSE_FILE = Path(__file__).parent / "serve.yml"
RANKS_FILE = Path(__file__).parent / "serve_ranks.yml"
_MOST_RANKS = 8
_EXIT_USAGE = 2


def run(arguments: list[str]) -> int:
    """Serves until Ctrl-C: 0; 1 if the mesh does not come up, 2 if the model cannot be served here."""
    options = _parser().parse_args(arguments)
    terminal = Terminal()
    try:
        folder = find_model_folder(options.model, revision=options.revision, say=terminal.line)
        model = check_model(folder)
        names = list(options.served_model_name) or [served_name(options.model)]
        worker = _worker_flags(options, folder, names[0], model)
    except (ModelSourceError, ModelCheckError) as error:
        terminal.error(f"radixmesh serve: {error}")
        return _EXIT_USAGE
    terminal.line(f"{names[0]}: {model.architecture}, {model.weights_bytes / (1 << 30):.2f} GiB of weights in {folder}")
    _set_environment(options, folder, worker, _router_flags(options, names))
    return up.run(
        _up_arguments(options),
        when_healthy=_greeting(options.port, names[0]),
        asked_by="radixmesh serve",
        port_flags="choose another --port or --grpc-port",
    )


def serve_environment(model: str, gpu: str) -> Path:
    """Sets the variables of the compose file that it returns, for a mesh on a model as `radixmesh serve` starts one.

    Raises ModelSourceError or ModelCheckError for a model that cannot be served here.
    """
    options = _parser().parse_args([model, "--gpu", gpu])
    folder = find_model_folder(model, revision=None, say=lambda line: None)
    worker = _worker_flags(options, folder, served_name(model), check_model(folder))
    _set_environment(options, folder, worker, [])
    return COMPOSE_FILE


def _set_environment(options: argparse.Namespace, folder: Path, worker: Sequence[str], router: Sequence[str]) -> None:
    os.environ.update(
        RADIXMESH_SERVE_FOLDER=str(folder),
        RADIXMESH_SERVE_WORKER=_command("worker", worker),
        RADIXMESH_SERVE_ROUTER=_command("router", router),
        RADIXMESH_SERVE_WORKERS=",".join(f"{name}:50051" for name in _rank_services(options.tp)),
        RADIXMESH_SERVE_PORT=str(options.port),
        RADIXMESH_SERVE_GRPC_PORT=str(options.grpc_port),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixmesh serve", description="Serve a model on this machine: one of each daemon, OpenAI's API over HTTP."
    )
    parser.add_argument("model", help="folder with config.json, tokenizer.json and safetensors, or a name on the hub")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--gpu", choices=("auto", "cpu", "cuda"), default="auto", help="what computes (default auto)")
    parser.add_argument("--port", type=_port, default=8000, help="of HTTP, on 127.0.0.1 (default 8000)")
    parser.add_argument("--grpc-port", type=_port, default=50050, help="of gRPC, on 127.0.0.1 (default 50050)")
    parser.add_argument(
        "--served-model-name",
        type=_names,
        default=(),
        metavar="A,B",
        help="names by which clients ask for it; answers carry the first (default: the folder's, or the hub's)",
    )
    parser.add_argument("--max-total-len", type=int, metavar="TOKENS", help="longest prompt and output together")
    parser.add_argument("--dtype", help="of weights and KV (default: float32 on a CPU if it fits, bfloat16 on a GPU)")
    parser.add_argument("--mem-fraction", type=float, help="share of the GPU's memory to use (default 0.88)")
    parser.add_argument(
        "--no-generation-config",
        action="store_true",
        help="requests that set no sampling get OpenAI's defaults, not those of the folder's generation_config.json",
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help=f"processes that hold the model together (tensor parallelism), 1 to {_MOST_RANKS}; a GPU each, or CPUs",
    )
    parser.add_argument("--api-keys-file", type=Path, help="keys that clients must send: docs/security.md")
    parser.add_argument("-p", "--project", help="name of this cluster (default radixmesh-serve)")
    parser.add_argument("--run-folder", type=Path, help="where its state goes (default .radixmesh/<project>)")
    parser.add_argument("--raw-logs", action="store_true", help="show the daemons' JSON logs as they are")
    parser.add_argument("--no-color", action="store_true", help="plain text")
    parser.add_argument(*("-d", "--detach"), action="store_true", help="return once it serves, and leave it running")
    return parser


def _worker_flags(options: argparse.Namespace, folder: Path, name: str, model: CheckedModel) -> list[str]:
    if not 1 <= options.tp <= _MOST_RANKS:
        raise ModelCheckError(f"--tp {options.tp}: choose 1 to {_MOST_RANKS} processes on one machine")
    if options.gpu == "cuda" and model.is_cpu_only:
        raise ModelCheckError(f"--gpu cuda: {model.architecture} runs on a CPU only; leave it out")
    gpus = count_gpus() if options.gpu != "cpu" and not model.is_cpu_only else 0
    if options.gpu == "cuda" and gpus == 0:
        raise ModelCheckError("--gpu cuda: the driver shows no NVIDIA GPU here; leave it out, or say --gpu cpu")
    if 0 < gpus < options.tp:
        raise ModelCheckError(
            f"--tp {options.tp}: this machine has {gpus} GPUs; choose at most {gpus}, or say --gpu cpu"
        )
    flags = ["--model", str(folder), "--served-model-name", name, "--backend", "cuda" if gpus else "cpu"]
    if options.no_generation_config:
        flags.append("--no-generation-config")
    dtype = options.dtype
    if not gpus and dtype is None:
        dtype = choose_cpu_dtype(model, available_memory())
    given = {
        "--dtype": dtype,
        "--max-total-len": options.max_total_len,
        "--mem-fraction": options.mem_fraction if gpus else None,
        "--tp-size": options.tp if options.tp > 1 else None,
    }
    return flags + [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


def _router_flags(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    flags = ["--model-aliases", ",".join(f"{alias}={names[0]}" for alias in names[1:])] if names[1:] else []
    if options.api_keys_file is not None:
        flags += ["--api-keys-file", str(options.api_keys_file.absolute())]
    return flags


def _up_arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["-f", str(COMPOSE_FILE)]
    if options.tp > 1:
        arguments += ["-f", str(RANKS_FILE)]
        for name in _rank_services(_MOST_RANKS)[options.tp :]:
            arguments += ["--scale", f"{name}=0"]
    for flag, value in (("-p", options.project), ("--run-folder", options.run_folder)):
        arguments += [flag, str(value)] if value is not None else []
    return arguments + [
        flag for flag in ("--raw-logs", "--no-color", "--detach") if getattr(options, flag[2:].replace("-", "_"))
    ]


def _rank_services(num_ranks: int) -> list[str]:
    """Services of the compose files, in the order of the ranks."""
    return ["worker", *(f"worker-rank-{rank}" for rank in range(1, num_ranks))]


def _greeting(port: int, name: str) -> str:
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"{name} is served at http://127.0.0.1:{port}/v1\n\n"
        f"  curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        "Or: radixmesh chat | radixmesh status | Ctrl-C stops everything."
    )


def _command(verb: str, flags: Sequence[str]) -> str:
    return shlex.join(["radixmesh", verb, *flags])


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 1 to 65535")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or any("=" in name for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} names no model: write A or A,B, without '='")
    return names
