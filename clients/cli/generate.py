"""`radixmesh generate`: completes a prompt or answers a chat message, streamed to the terminal."""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass

import grpc

from radixmesh.cli.access import Access, access_from_environment, access_of, add_access_flags
from radixmesh.cli.output_printer import OutputPrinter
from radixmesh.cli.routers import find_routers
from radixmesh.cli.terminal import Terminal
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.tokenizer.v1 import tokenizer_pb2

_DEMO_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """Times of a streamed request."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_text_s: float | None
    """Seconds to the first text; None if there was none."""
    total_s: float


def run(arguments: list[str]) -> int:
    """Streams the outputs: 0 if all ended well, 1 with a message if not."""
    options = _parser().parse_args(arguments)
    terminal = Terminal()
    try:
        access = access_of(options)
        router = find_routers([options.router] if options.router else [], options.project, access)[0]
        request = build_request(options, _read_prompt(options.prompt))
        figures = asyncio.run(stream_request(router, request, terminal, access))
    except (MeshError, NotRunningError, OSError, ValueError) as error:
        Terminal(sys.stderr).error(f"radixmesh generate: {error}")
        return 1
    if options.stats:
        Terminal(sys.stderr).line(_describe(figures))
    return 0


async def stream_completion(router: str, prompt: str, terminal: Terminal) -> None:
    """Streams one greedy completion of `prompt`; raises MeshError."""
    sampling = common_pb2.SamplingParams(temperature=0.0)
    stop = common_pb2.StopParams(max_tokens=_DEMO_TOKENS)
    terminal.write(prompt)
    figures = await stream_request(
        router, router_pb2.GenerateRequest(text=prompt, sampling=sampling, stop=stop), terminal
    )
    terminal.line(terminal.colour(_describe(figures), "2"))


async def stream_request(
    router: str, request: router_pb2.GenerateRequest, terminal: Terminal, access: Access | None = None
) -> StreamFigures:
    """Sends `request` to the router and shows what comes back. Raises MeshError, also where a single output failed."""
    access = access or access_from_environment()
    started = time.monotonic()
    first_text_s: float | None = None
    printer = OutputPrinter(terminal, request.n if request.HasField("n") else 1)
    usages: list[common_pb2.Usage] = []
    failure: MeshError | None = None
    async with open_channel(router, access.tls) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            async for response in stub.Generate(request, metadata=access.metadata):
                for delta in response.deltas:
                    if delta.text:
                        first_text_s = time.monotonic() - started if first_text_s is None else first_text_s
                        printer.text(delta.index, delta.text)
                for finished in response.finished:
                    printer.finished(finished.index, _describe_ending(finished))
                    usages.append(finished.usage)
                    if finished.HasField("error"):
                        failure = MeshError.from_proto(finished.error)
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from error
    if failure is not None:
        raise failure
    return StreamFigures(
        prompt_tokens=max((usage.prompt_tokens for usage in usages), default=0),
        cached_tokens=max((usage.cached_tokens for usage in usages), default=0),
        output_tokens=sum(usage.output_tokens for usage in usages),
        first_text_s=first_text_s,
        total_s=time.monotonic() - started,
    )


def build_request(options: argparse.Namespace, prompt: str) -> router_pb2.GenerateRequest:
    """Turns the flags into a request. A flag that was not given leaves its field unset: the router's default holds."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    request = router_pb2.GenerateRequest(model=options.model)
    if options.chat:
        roles = [("system", options.system)] if options.system is not None else []
        messages = [tokenizer_pb2.ChatMessage(role=role, content=text) for role, text in [*roles, ("user", prompt)]]
        request.chat.CopyFrom(tokenizer_pb2.ChatInput(messages=messages))
    else:
        request.text = prompt
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        if name in given:
            setattr(request.sampling, name, given[name])
    if "max_tokens" in given:
        request.stop.max_tokens = options.max_tokens
    if options.ignore_eos:
        request.stop.ignore_eos = True
    if options.stop:
        request.stop.stop.extend(options.stop)
    if "n" in given:
        request.n = options.n
    return request


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixmesh generate", description="Complete a prompt, or answer a chat message."
    )
    parser.add_argument("prompt", help="the text; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="send it as a user's message, through the model's chat template"
    )
    parser.add_argument("--system", help="with --chat: the system message before it")
    parser.add_argument("--max-tokens", type=_count, help="at most so many output tokens")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default 1")
    parser.add_argument("--top-k", type=_count, help="keep the k most likely tokens; 0 keeps all")
    parser.add_argument("--top-p", type=float, help="keep the most likely tokens up to this probability")
    parser.add_argument("--min-p", type=float, help="keep tokens of at least this share of the best one's probability")
    parser.add_argument("--seed", type=_seed, help="the same seed gives the same output")
    parser.add_argument("-n", type=_count, help="number of outputs")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's own end")
    parser.add_argument("--model", default="", help="name of the model, where several are served")
    parser.add_argument("--router", metavar="ADDRESS", help="default: RADIXMESH_ROUTER, or the cluster that runs here")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    add_access_flags(parser)
    parser.add_argument("--stats", action="store_true", help="write tokens and times to standard error at the end")
    return parser


def _count(text: str) -> int:
    # The router says if the number is sensible: it knows the reason. The field only needs it unsigned.
    return _unsigned(text, 32)


def _seed(text: str) -> int:
    return _unsigned(text, 64)


def _unsigned(text: str, bits: int) -> int:
    if not text.isdecimal() or int(text) >= 2**bits:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**bits - 1}")
    return int(text)


def _read_prompt(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _describe_ending(finished: router_pb2.OutputFinished) -> str:
    """An output that ended by itself needs no word; one that was cut does."""
    if finished.reason == common_pb2.FINISH_REASON_STOP:
        return ""
    return common_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()


def _describe(figures: StreamFigures) -> str:
    first = "" if figures.first_text_s is None else f", first text after {figures.first_text_s * 1000:.0f} ms"
    rate = figures.output_tokens / figures.total_s if figures.total_s > 0 else 0.0
    prompt = f"{figures.prompt_tokens} prompt tokens ({figures.cached_tokens} cached)"
    return f"{prompt}, {figures.output_tokens} output tokens{first}, {figures.total_s:.2f} s, {rate:.0f} tokens/s"
