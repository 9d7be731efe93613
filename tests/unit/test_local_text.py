"""The vocabulary in the router's own process: what it encodes, and all that it leaves to the daemons."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.peers.local_text import LocalText, is_cheap
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import tokenizer_fingerprint
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.encode_request import encode_request
from radixmesh.daemons.runtime.tokenize.text_codec import Limits, TextCodec, run_whole
from radixmesh.tokenizer.v1 import tokenizer_pb2 as pb

TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
OURS = tokenizer_fingerprint(TINY)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def loaded(folder: Path = TINY, fingerprints: Sequence[str] = (OURS,), clock: Clock | None = None) -> LocalText:
    clock = clock or Clock()
    text = LocalText(folder, lambda: fingerprints, clock, cpu_clock=clock)
    await text.load()
    return text


def of_text(text: str, **more: object) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=[pb.EncodeItem(text=text)], **more)  # type: ignore[arg-type]


def of_chat(content: str) -> pb.EncodeRequest:
    request = pb.EncodeRequest()
    message = request.items.add().chat.messages.add()
    message.role, message.content = "user", content
    return request


def of_a_tokenizer(request: pb.EncodeRequest) -> pb.EncodeResponse:
    codec = TextCodec(Vocabulary.load(TINY), ChatTemplate.load(TINY), Limits())
    return run_whole(encode_request(lambda: codec, request))


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: of_text("Tyger Tyger, burning bright"),
        lambda: of_text(""),
        lambda: of_text("x " * 400, max_tokens=12),
        lambda: of_chat("In the forests of the night"),
        lambda: pb.EncodeRequest(items=[pb.EncodeItem(), pb.EncodeItem(text="frame", add_special_tokens=False)]),
    ],
)
async def test_it_answers_as_a_tokenizer_does(request_of: object) -> None:
    request = request_of()  # type: ignore[operator]
    assert (await loaded()).encode(request) == of_a_tokenizer(request)


async def test_long_requests_are_for_a_tokenizer() -> None:
    text = await loaded()
    assert text.encode(of_text("x" * 900)) is not None
    assert text.encode(of_text("x" * 1100)) is None


async def test_ids_of_another_vocabulary_are_never_given() -> None:
    assert (await loaded(fingerprints=(OURS, ""))).encode(of_text("x")) is not None
    assert (await loaded(fingerprints=(OURS, "another"))).encode(of_text("x")) is None


async def test_nothing_is_encoded_before_anybody_has_said_what_is_served() -> None:
    """The model that comes may have another vocabulary: its tokenizer knows, and these ids would be refused then."""
    assert (await loaded(fingerprints=())).encode(of_text("x")) is None


async def test_a_request_that_a_tokenizer_refuses_whole_is_no_reason_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client could send everybody's prompts the long way with it."""
    text = await loaded()

    def refuse(*_: object) -> None:
        raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, "a batch of too many items", {})

    with monkeypatch.context() as refusing:
        refusing.setattr(TextCodec, "check_num_items", refuse)
        assert text.encode(of_text("x")) is None
    assert text.encode(of_text("x")) is not None


async def test_nothing_is_encoded_until_the_folder_is_read() -> None:
    text = LocalText(TINY, lambda: (OURS,))
    assert text.encode(of_text("x")) is None and text.vocabulary is None


async def test_a_folder_that_cannot_be_read_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        text = await loaded(tmp_path)
    assert text.encode(of_text("x")) is None and text.vocabulary is None
    assert "text_not_local" in caplog.text


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
async def test_a_folder_that_changes_while_it_is_read_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The fingerprint is read first: the ids of other files would pass for those of the served model."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    load = ChatTemplate.load

    def change(path: Path) -> ChatTemplate:
        other = tmp_path / "other"
        other.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"")
        other.rename(folder / name)
        return load(path)

    monkeypatch.setattr(ChatTemplate, "load", change)
    with caplog.at_level("WARNING"):
        text = await loaded(folder)
    assert text.encode(of_text("x")) is None and text.vocabulary is None
    assert "text_not_local" in caplog.text


class PanicException(BaseException):
    """As the tokenizers library raises where its Rust code panics."""


async def test_a_panic_of_the_library_is_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    text = await loaded(clock=clock)

    def panic(*_: object) -> None:
        raise PanicException("index out of bounds")

    with monkeypatch.context() as broken:
        broken.setattr(TextCodec, "encode_texts", panic)
        assert text.encode(of_text("x")) is None
    assert text.encode(of_text("x")) is None
    clock.now += 61
    assert text.encode(of_text("x")) is not None


async def test_what_takes_long_is_left_to_tokenizers_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    text = await loaded(clock=clock)
    encode = TextCodec.encode_texts

    def slow(codec: TextCodec, *arguments: object) -> object:
        clock.now += 0.02
        return encode(codec, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as broken:
        broken.setattr(TextCodec, "encode_texts", slow)
        assert text.encode(of_text("x")) is not None
    assert text.encode(of_text("x")) is None
    clock.now += 61
    assert text.encode(of_text("x")) is not None


async def test_an_encoding_that_is_interrupted_is_no_reason_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine gives other processes turns in the middle of one."""
    clock, cpu_clock = Clock(), Clock()
    text = LocalText(TINY, lambda: (OURS,), clock, cpu_clock=cpu_clock)
    await text.load()
    encode = TextCodec.encode_texts

    def interrupted(codec: TextCodec, *arguments: object) -> object:
        clock.now += 0.02
        cpu_clock.now += 0.0003
        return encode(codec, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TextCodec, "encode_texts", interrupted)
    assert all(text.encode(of_text("x")) is not None for _ in range(100))


async def test_a_flood_of_prompts_takes_no_more_than_a_share_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    text = await loaded(clock=clock)
    encode = TextCodec.encode_texts

    def busy(codec: TextCodec, *arguments: object) -> object:
        clock.now += 0.0005  # Twice a request.
        return encode(codec, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TextCodec, "encode_texts", busy)
    assert sum(text.encode(of_text("x")) is not None for _ in range(1000)) == 67
    clock.now += 0.1  # A quarter of which makes up for 25 ms.
    assert sum(text.encode(of_text("x")) is not None for _ in range(1000)) in (33, 34)
    clock.now += 1.0
    for _ in range(1000):  # Requests at low load are untouched by it.
        clock.now += 0.005
        assert text.encode(of_text("x")) is not None


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% endfor %}",
        "{{ 'prompt ' * 2000 }}",
        "{% for i in range(3000) %}prompt {% endfor %}",
    ],
    ids=["takes long", "makes much at once", "makes much"],
)
async def test_a_costly_template_is_left_to_tokenizers(tmp_path: Path, template: str) -> None:
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    clock = Clock()
    text = await loaded(folder, clock=clock, fingerprints=("",))
    assert text.encode(of_text("x")) is not None
    assert text.encode(of_chat("hello")) is None
    # Nor is it tried again with the next chat.
    assert text.encode(of_text("x")) is None
    clock.now += 61
    assert text.encode(of_text("x")) is not None


def test_only_cheap_outputs_are_decoded_here() -> None:
    assert is_cheap(0, ()) and is_cheap(1024, ("stop",) * 8) and is_cheap(0, ("x" * 128,))
    assert not is_cheap(1025, ()) and not is_cheap(0, ("stop",) * 9) and not is_cheap(0, ("x" * 129,))
