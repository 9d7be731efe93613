"""`radixmesh chat`: a conversation in the terminal, streamed; it goes on unseen when a router dies."""

import argparse
import asyncio
import sys
from pathlib import Path

from radixmesh.cli.access import Access, access_of, add_access_flags
from radixmesh.cli.chat.commands import NAMES, ChatState
from radixmesh.cli.chat.conversation import Conversation
from radixmesh.cli.chat.input import ChatInput, default_history_file, open_input
from radixmesh.cli.chat.loop import ChatLoop
from radixmesh.cli.routers import find_routers
from radixmesh.cli.terminal import Terminal
from radixmesh.client import AsyncClient, RadixMeshError
from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.runtime.errors import MeshError


def run(arguments: list[str]) -> int:
    """Chats until Ctrl-D: 0; 1 with a message if there is no mesh, or a message from a pipe failed."""
    options = _parser().parse_args(arguments)
    try:
        access = access_of(options)
        routers = find_routers(options.router, options.project, access)
        history = None if options.no_history else options.history or default_history_file()
        return asyncio.run(_chat(routers, open_input(NAMES, history), options, access))
    except (RadixMeshError, MeshError, NotRunningError, OSError, ValueError) as error:
        Terminal(sys.stderr).error(f"radixmesh chat: {error}")
        return 1


async def _chat(routers: list[str], input: ChatInput, options: argparse.Namespace, access: Access) -> int:
    terminal = Terminal()
    state = ChatState(
        conversation=Conversation(system=options.system),
        temperature=options.temperature,
        max_tokens=options.max_tokens,
    )
    async with AsyncClient(routers, api_key=access.api_key, tls=access.tls) as client:
        models = await client.models()
        if options.model and options.model not in [model.name for model in models]:
            names = ", ".join(model.name for model in models) or "none"
            terminal.error(f"radixmesh chat: there is no model {options.model!r}; served: {names}")
            return 1
        if input.is_interactive:
            name = options.model or (models[0].name if models else "no model yet")
            terminal.line(terminal.colour(f"{name}: /help for commands, Ctrl-D leaves", "2"))
        return await ChatLoop(client, input, terminal, state, model=options.model).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixmesh chat",
        description="Chat in the terminal. From a pipe every line is a message, and only the answers are written.",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="at most so many tokens an answer")
    parser.add_argument("--model", default="", help="name of the model, where several are served")
    parser.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="repeatable; default: RADIXMESH_ROUTER, or the cluster that runs here",
    )
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    add_access_flags(parser)
    parser.add_argument("--history", type=Path, metavar="FILE", help=f"default: {default_history_file()}")
    parser.add_argument("--no-history", action="store_true", help="keep no messages beyond this chat")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return int(text)
