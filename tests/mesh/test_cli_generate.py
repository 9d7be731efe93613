"""`radixmesh generate` against a router that answers from a script."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

SRC = Path(__file__).parents[2] / "src"


class ScriptedRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers with the messages of `script`, after the resolved request; keeps what it was asked."""

    def __init__(self):
        self.script = []
        self.error = None
        self.requests = []

    async def Generate(self, request, context):
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        n = request.n if request.HasField("n") else 1
        yield router_pb2.GenerateResponse(resolved=router_pb2.Resolved(request_id="r", seeds=range(n)))
        for message in self.script:
            yield message


def delta(index, offset, text):
    return router_pb2.Delta(index=index, first_output_index=offset, text_offset=offset, text=text)


def finished(index, num_output, reason=common_pb2.FINISH_REASON_STOP, error=None):
    usage = common_pb2.Usage(prompt_tokens=5, output_tokens=num_output, cached_tokens=3)
    return router_pb2.OutputFinished(index=index, reason=reason, num_output=num_output, usage=usage, error=error)


@pytest.fixture
async def router():
    progress = Progress()
    progress.loaded()
    servicer = ScriptedRouter()
    server = MeshServer(HealthService(progress))
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer)
    (servicer.address,) = await server.start(["127.0.0.1:0"])
    yield servicer
    await server.stop(0)


async def run_generate(*arguments, stdin="", cwd=None):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "radixmesh.cli", "generate", *arguments),
        env={"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]},
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate(stdin.encode())
    return process.returncode, out.decode(), err.decode()


async def test_text_is_streamed_and_a_cut_output_says_so(router):
    router.script = [
        router_pb2.GenerateResponse(deltas=[delta(0, 0, "one ")]),
        router_pb2.GenerateResponse(deltas=[delta(0, 4, "two")], finished=[finished(0, 2)]),
    ]
    assert await run_generate("hello", "--router", router.address) == (0, "one two\n", "")
    router.script[-1].finished[0].reason = common_pb2.FINISH_REASON_LENGTH
    code, out, err = await run_generate("-", "--router", router.address, "--stats", stdin="from stdin")
    assert (code, out) == (0, "one two [length]\n")
    assert err.startswith("5 prompt tokens (3 cached), 2 output tokens, first text after ")
    assert [request.text for request in router.requests] == ["hello", "from stdin"]


async def test_flags_reach_the_request_and_absent_ones_stay_unset(router):
    router.script = [router_pb2.GenerateResponse(finished=[finished(0, 0)])]
    await run_generate("x", "--router", router.address)
    (plain,) = router.requests
    assert plain == router_pb2.GenerateRequest(text="x")
    sampling = "--temperature 0 --top-k 0 --top-p 0.5 --min-p 0 --seed 0"
    others = "--max-tokens 7 --stop a --stop b --ignore-eos --model m --chat --system brief"
    await run_generate("hi", "--router", router.address, *sampling.split(), *others.split())
    request = router.requests[1]
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "brief"),
        ("user", "hi"),
    ]
    # Zeros given are zeros sent.
    assert all(request.sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.0, 0.5, 0)
    assert (request.stop.max_tokens, list(request.stop.stop), request.stop.ignore_eos) == (7, ["a", "b"], True)
    assert request.model == "m"


async def test_several_outputs_are_shown_one_after_the_other(router):
    router.script = [
        router_pb2.GenerateResponse(deltas=[delta(1, 0, "B1"), delta(0, 0, "A1")]),
        router_pb2.GenerateResponse(deltas=[delta(1, 2, "B2")], finished=[finished(1, 2)]),
        router_pb2.GenerateResponse(deltas=[delta(0, 2, "A2")], finished=[finished(0, 2)]),
    ]
    code, out, _ = await run_generate("x", "-n", "2", "--router", router.address)
    assert (code, out) == (0, "--- output 0 ---\nA1A2\n--- output 1 ---\nB1B2\n")


async def test_errors_are_one_line_with_their_reason(router, tmp_path):
    router.error = MeshError(common_pb2.ERROR_REASON_EMPTY_PROMPT, "send at least one token")
    code, out, err = await run_generate("x", "--router", router.address)
    assert (code, out) == (1, "") and err == "radixmesh generate: EMPTY_PROMPT: send at least one token\n"
    router.error = None
    failed = MeshError(common_pb2.ERROR_REASON_INTERNAL, "it broke").to_proto()
    router.script = [
        router_pb2.GenerateResponse(deltas=[delta(0, 0, "some")]),
        router_pb2.GenerateResponse(finished=[finished(0, 1, common_pb2.FINISH_REASON_ERROR, failed)]),
    ]
    code, out, err = await run_generate("x", "--router", router.address)
    assert (code, out) == (1, "some [error]\n") and "INTERNAL: it broke" in err
    code, out, err = await run_generate("x", "--router", "127.0.0.1:1")
    assert code == 1 and "Traceback" not in err and "radixmesh generate: " in err
    code, _, err = await run_generate("x", cwd=tmp_path)
    assert code == 1 and "radixmesh up" in err
    code, _, err = await run_generate("x", "-n", "-3")
    assert code == 2
