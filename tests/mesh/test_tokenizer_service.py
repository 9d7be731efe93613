"""The tokenizer over real gRPC: every call, every refusal, and a loop that stays free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.running_daemon import Running, process_of, running
from support.small_tokenizers import byte_level, write_folder

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.peers.grpc_peers import GrpcTokenizer
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.encode_calls import MAX_CALL_BYTES, MAX_CALLS
from radixmesh.daemons.runtime.errors import MeshError, reason_name
from radixmesh.daemons.runtime.model_folder.fingerprint import tokenizer_fingerprint
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.daemons.tokenizer.config import TokenizerSettings
from radixmesh.daemons.tokenizer.daemon import TokenizerDaemon
from radixmesh.tokenizer.v1 import tokenizer_pb2 as pb
from radixmesh.tokenizer.v1 import tokenizer_pb2_grpc

TOKENIZER = byte_level()
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}{{ m.name }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
Stub = tokenizer_pb2_grpc.TokenizerServiceStub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "small", TOKENIZER, chat_template=TEMPLATE)


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Running[TokenizerDaemon]]:
    settings = TokenizerSettings(model=folder, max_items=64, max_text_bytes=1 << 20, max_messages=16)
    async with running(TokenizerDaemon, settings) as daemon:
        yield daemon


@pytest.fixture
async def stub(tokenizer: Running[TokenizerDaemon]) -> AsyncIterator[Stub]:
    async with open_channel(tokenizer.address) as channel:
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)


async def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.01)


async def refusal(call: grpc.aio.UnaryUnaryCall[object, object]) -> tuple[str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    error = mesh_error_from_rpc(raised.value)
    return error.reason_name, dict(error.metadata)


def chat(*contents: str, **fields: object) -> pb.EncodeItem:
    messages = [pb.ChatMessage(role="user", content=content) for content in contents]
    return pb.EncodeItem(chat=pb.ChatInput(messages=messages, **fields))


async def test_a_batch_of_texts_and_chats(stub: Stub, folder: Path) -> None:
    response = await stub.Encode(
        pb.EncodeRequest(
            items=[
                pb.EncodeItem(text="Hello 日本 😀"),
                pb.EncodeItem(text="Hello", add_special_tokens=False),
                pb.EncodeItem(text=""),
                pb.EncodeItem(text="", add_special_tokens=False),
                chat("Hello"),
                chat("a", "b", add_generation_prompt=False),
                chat("a", "b ", continue_final_message=True),
            ]
        )
    )
    assert response.tokenizer_fingerprint == tokenizer_fingerprint(folder)
    assert not any(item.HasField("error") for item in response.items)
    bos = TOKENIZER.token_to_id("<s>")
    ids = [unpack_ints(item.ids, "ids").tolist() for item in response.items]
    assert ids[0] == TOKENIZER.encode("Hello 日本 😀").ids and ids[0][0] == bos
    assert ids[1] == TOKENIZER.encode("Hello", add_special_tokens=False).ids
    assert ids[2:4] == [[bos], []]
    rendered = [item.rendered for item in response.items]
    assert rendered == ["", "", "", "", "<|user|>Hello>", "<|user|>a<|user|>b", "<|user|>a<|user|>b "]
    assert ids[4:] == [TOKENIZER.encode(text, add_special_tokens=False).ids for text in rendered[4:]]
    texts = (await stub.Decode(pb.DecodeRequest(ids=[pack_ints(i) for i in ids]))).texts
    assert list(texts[:4]) == ["Hello 日本 😀", "Hello", "", ""]
    with_special = await stub.Decode(pb.DecodeRequest(ids=[pack_ints(ids[4])], skip_special_tokens=False))
    assert list(with_special.texts) == ["<|user|>Hello>"]


async def test_items_fail_alone_and_typed(stub: Stub) -> None:
    broken = [
        (pb.EncodeItem(), "MISSING_FIELD"),
        (pb.EncodeItem(text="x" * ((1 << 20) + 1)), "TOO_LARGE"),
        (chat(), "INVALID_CHAT"),
        (chat(*["m"] * 17), "TOO_LARGE"),
        (chat("m", tools_json="{"), "INVALID_CHAT"),
        (chat("m", template_args_json='{"messages": []}'), "INVALID_CHAT"),
        (chat("m", continue_final_message=True, add_generation_prompt=True), "INVALID_CHAT"),
        (
            pb.EncodeItem(chat=pb.ChatInput(messages=[pb.ChatMessage(role="u", extra_json='{"name": "\\udc00"}')])),
            "INVALID_CHAT",
        ),
    ]
    items = [item for pair in broken for item in (pair[0], pb.EncodeItem(text="fine", add_special_tokens=False))]
    response = await stub.Encode(pb.EncodeRequest(items=items))
    assert [reason_name(item.error.reason) for item in response.items[::2]] == [reason for _, reason in broken]
    assert all(item.error.message and not item.ids for item in response.items[::2])
    fine = pack_ints(TOKENIZER.encode("fine", add_special_tokens=False).ids)
    assert all(item.ids == fine and not item.HasField("error") for item in response.items[1::2])


async def test_calls_that_are_refused(stub: Stub, tokenizer: Running[TokenizerDaemon]) -> None:
    too_many = [pb.EncodeItem(text="a")] * 65
    assert await refusal(stub.Encode(pb.EncodeRequest(items=too_many))) == ("TOO_LARGE", {"size": "65", "max": "64"})
    assert (await refusal(stub.Decode(pb.DecodeRequest(ids=[b""] * 65))))[0] == "TOO_LARGE"
    assert (await refusal(stub.Decode(pb.DecodeRequest(ids=[b"123"]))))[0] == "MALFORMED_MESSAGE"
    reason, metadata = await refusal(stub.Decode(pb.DecodeRequest(ids=[pack_ints([1]), pack_ints([1, 402])])))
    assert (reason, metadata["position"], metadata["id"]) == ("TOKEN_OUT_OF_VOCABULARY", "1", "402")
    nothing = pb.CompileGrammarRequest(grammar=common_pb2.Grammar(any_json=False))
    assert await refusal(stub.CompileGrammar(nothing)) == ("MISSING_FIELD", {"field": "grammar"})
    empty = pb.CompileGrammarRequest(grammar=common_pb2.Grammar(regex=""))
    assert (await refusal(stub.CompileGrammar(empty)))[0] == "INVALID_GRAMMAR"
    async with open_channel(tokenizer.address) as channel:
        raw = channel.unary_unary("/radixmesh.tokenizer.v1.TokenizerService/Encode")
        for garbage in (b"\xff\xff\xff", pb.EncodeItem(text="x").SerializeToString() + b"\x0a\x7f"):
            assert (await refusal(raw(garbage)))[0] == "MALFORMED_MESSAGE"
    assert (await stub.Encode(pb.EncodeRequest(items=[pb.EncodeItem(text="on")]))).items[0].ids


async def test_the_vocabulary(stub: Stub, folder: Path) -> None:
    response = await stub.GetVocabulary(pb.GetVocabularyRequest())
    assert response.model.name == "small"
    assert response.model.tokenizer_fingerprint == tokenizer_fingerprint(folder)
    assert response.model.vocab_size == len(response.tokens) == TOKENIZER.get_vocab_size()
    assert response.has_chat_template
    assert [TOKENIZER.id_to_token(i) for i in range(len(response.tokens))] == list(response.tokens)
    special = [response.tokens[i] for i in unpack_ints(response.special_ids, "special_ids")]
    assert special == ["<s>", "</s>", "<|user|>"]
    assert unpack_ints(response.model.eos_ids, "eos_ids").tolist() == [TOKENIZER.token_to_id("</s>")]


async def test_a_long_batch_leaves_the_loop_free(stub: Stub, tokenizer: Running[TokenizerDaemon]) -> None:
    """Health answers, and a short text overtakes, while megabytes are encoded."""
    text = "It was the best of times, it was the worst of times. " * 15_000
    long = asyncio.ensure_future(stub.Encode(pb.EncodeRequest(items=[pb.EncodeItem(text=text)] * 8)))
    await asyncio.sleep(0.1)
    assert not long.done()
    start = time.monotonic()
    assert await check_health(tokenizer.address) == "SERVING"
    await stub.Encode(pb.EncodeRequest(items=[pb.EncodeItem(text="short")]))
    took_s = time.monotonic() - start
    is_overtaken = not long.done()
    response = await long
    assert is_overtaken and took_s < 1.0, took_s
    assert all(len(item.ids) == len(response.items[0].ids) > 100_000 for item in response.items)


async def test_a_full_queue_refuses(folder: Path) -> None:
    settings = TokenizerSettings(model=folder, num_threads=1, max_queued=2)
    async with running(TokenizerDaemon, settings) as daemon, open_channel(daemon.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        request = pb.EncodeRequest(items=[pb.EncodeItem(text="many words " * 30_000)])
        calls = [stub.Encode(request) for _ in range(6)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        refused = [mesh_error_from_rpc(e) for e in outcomes if isinstance(e, grpc.RpcError)]
        assert refused and {e.reason_name for e in refused} == {"OVERLOADED"}
        assert all(e.metadata["retry_after_ms"] for e in refused)
        assert len(refused) < 6
        assert (await stub.Encode(request)).items[0].ids


async def test_loading_and_draining_daemons_take_nothing_new(folder: Path) -> None:
    starting = running(TokenizerDaemon, TokenizerSettings(model=folder), load=False)
    async with starting as daemon, open_channel(daemon.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        request = pb.EncodeRequest(items=[pb.EncodeItem(text="a")])
        assert (await refusal(stub.Encode(request)))[0] == "NOT_SERVING"
        await daemon.daemon.load()
        daemon.runtime.progress.loaded()
        long = asyncio.ensure_future(stub.Encode(pb.EncodeRequest(items=[pb.EncodeItem(text="many words " * 50_000)])))
        await asyncio.sleep(0.05)
        daemon.runtime.progress.drain()
        assert (await refusal(stub.GetVocabulary(pb.GetVocabularyRequest())))[0] == "NOT_SERVING"
        await asyncio.wait_for(daemon.daemon.drain(), 60)
        assert (await long).items[0].ids


async def test_a_client_that_goes_away_frees_its_place(folder: Path) -> None:
    settings = TokenizerSettings(model=folder, num_threads=1, max_queued=1, max_text_bytes=64 << 20)
    async with running(TokenizerDaemon, settings) as daemon, open_channel(daemon.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        # Half a minute of encoding, which goes on part by part.
        long = pb.EncodeRequest(items=[pb.EncodeItem(text="many words " * 1_000_000) for _ in range(4)])
        call = stub.Encode(long)
        await until(lambda: daemon.runtime.progress.num_completed > 2)
        small_request = pb.EncodeRequest(items=[pb.EncodeItem(text="a")])
        assert (await refusal(stub.Encode(small_request)))[0] == "OVERLOADED"
        call.cancel()
        # The part that is being encoded is the last one.
        await asyncio.wait_for(daemon.daemon.drain(), 10)
        assert (await stub.Encode(small_request)).items[0].ids


class Counting(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Counts calls by verb. has_stream: it offers EncodeEach."""

    def __init__(self, *, has_stream: bool) -> None:
        self.num = {"Encode": 0, "EncodeEach": 0}
        self._has_stream = has_stream

    async def Encode(self, request: pb.EncodeRequest, context: object) -> pb.EncodeResponse:
        self.num["Encode"] += 1
        return pb.EncodeResponse(items=[pb.EncodedItem(ids=b"unary")] * len(request.items))

    async def EncodeEach(
        self, request_iterator: AsyncIterator[pb.EncodeEachRequest], context: object
    ) -> AsyncIterator[pb.EncodeEachResponse]:
        if not self._has_stream:
            raise NotImplementedError
        async for call in request_iterator:
            self.num["EncodeEach"] += 1
            response = pb.EncodeResponse(items=[pb.EncodedItem(ids=b"stream")] * len(call.request.items))
            yield pb.EncodeEachResponse(call_id=call.call_id, response=response)


@asynccontextmanager
async def counting(address: str, *, has_stream: bool) -> AsyncIterator[Counting]:
    servicer = Counting(has_stream=has_stream)
    server = MeshServer(HealthService(Progress()))
    server.add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, servicer)
    await server.start([address])
    try:
        yield servicer
    finally:
        await server.stop(0)


async def test_short_calls_of_a_router_share_a_stream_and_give_what_calls_of_their_own_give(
    tokenizer: Running[TokenizerDaemon], stub: Stub
) -> None:
    router = GrpcTokenizer(tokenizer.address)
    requests = [
        pb.EncodeRequest(items=[pb.EncodeItem(text="Hello 日本 😀"), chat("a", "b"), pb.EncodeItem()]),
        pb.EncodeRequest(items=[pb.EncodeItem(text="many words " * 20)], max_tokens=3),
        *(pb.EncodeRequest(items=[pb.EncodeItem(text=f"text {number}")]) for number in range(2 * MAX_CALLS)),
    ]
    answers = await asyncio.gather(*(router.encode(request, 30.0) for request in requests))
    assert answers == [await stub.Encode(request) for request in requests]
    too_many = pb.EncodeRequest(items=[pb.EncodeItem(text="a")] * 65)
    with pytest.raises(MeshError) as raised:
        await router.encode(too_many, 30.0)
    assert (raised.value.reason_name, raised.value.metadata) == ("TOO_LARGE", {"size": "65", "max": "64"})
    assert (await router.encode(requests[0], 30.0)) == answers[0], "the stream goes on"
    await router.close()


async def test_which_calls_go_by_the_stream(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    router = GrpcTokenizer(address)
    short = pb.EncodeRequest(items=[pb.EncodeItem(text="short")])
    async with counting(address, has_stream=True) as servicer:
        assert (await router.encode(short, 30.0)).items[0].ids == b"stream"
        long = pb.EncodeRequest(items=[pb.EncodeItem(text="x" * MAX_CALL_BYTES)])
        assert (await router.encode(long, 30.0)).items[0].ids == b"unary"
        assert servicer.num == {"Encode": 1, "EncodeEach": 1}
    with pytest.raises(MeshError) as raised:
        await router.encode(short, 5.0)
    assert raised.value.status == "UNAVAILABLE"
    # An older one in its place, which knows no such stream.
    async with counting(address, has_stream=False) as servicer:
        async with asyncio.timeout(30):
            while True:
                try:
                    assert (await router.encode(short, 5.0)).items[0].ids == b"unary"
                    break
                except MeshError as error:  # Not reached yet.
                    assert error.status == "UNAVAILABLE"
                    await asyncio.sleep(0.02)
        num = servicer.num["Encode"]
        assert (await router.encode(short, 30.0)).items[0].ids == b"unary"
        assert servicer.num == {"Encode": num + 1, "EncodeEach": 0}
    await router.close()


async def test_a_daemon_that_leaves_waits_for_no_idle_stream(folder: Path) -> None:
    async with running(TokenizerDaemon, TokenizerSettings(model=folder)) as daemon:
        router = GrpcTokenizer(daemon.address)
        short = pb.EncodeRequest(items=[pb.EncodeItem(text="short")])
        await router.encode(short, 30.0)
        daemon.runtime.progress.drain()
        with pytest.raises(MeshError) as raised:
            await router.encode(short, 30.0)
        assert raised.value.reason_name == "NOT_SERVING"
        await daemon.daemon.close()
        async with asyncio.timeout(30):
            await daemon.runtime.server.stop(3600)
        await router.close()


async def test_the_process_serves_soon(tmp_path: Path) -> None:
    argv = ["--model", str(TINY), "--listen", "127.0.0.1:0", "--log-level", "warning"]
    start = time.monotonic()
    async with process_of("radixmesh.daemons.tokenizer", argv, tmp_path / "address") as (address, _):
        while await check_health(address) != "SERVING":
            await asyncio.sleep(0.02)
        # 0.7 s on an idle core; the bound leaves room for a very busy machine.
        assert time.monotonic() - start < 40
        async with open_channel(address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            messages = [pb.ChatMessage(role="user", content="Who are you?")]
            (item,) = (
                await stub.Encode(pb.EncodeRequest(items=[pb.EncodeItem(chat=pb.ChatInput(messages=messages))]))
            ).items
            assert "Who are you?" in item.rendered and item.ids
