"""A router with a vocabulary in its own process: SentencePiece ones, and several models, as through the daemons."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.router_mesh import MODEL, TINY, RouterMesh, router_mesh
from support.small_tokenizers import SENTENCEPIECE_KINDS, TEXTS, write_folder

from radixmesh.client import AsyncClient, RadixMeshError
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router import router as router_module
from radixmesh.daemons.router.peers.local_detokenizer import LocalDetokenizer
from radixmesh.daemons.router.peers.local_text import LocalText
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.tokenizer.v1 import tokenizer_pb2

# Tokens that are added to the vocabularies, special ones and others, as texts have them.
_ADDED = "It was<start_of_turn>the best\n\nof unused99times</s>, it was   <extra_id_0>the worst <mask>"
_MANY = 12
Asked = tuple[str | list[int], dict[str, object]]


class Here:
    """Work of the router's own process: calls that were encoded, and outputs that were decoded there or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_encoded = 0
        self.takes = collections.Counter[tuple[str, bool]]()
        encode, takes = LocalText.encode, LocalDetokenizer.takes

        def counted_encode(
            text: LocalText, request: tokenizer_pb2.EncodeRequest
        ) -> tokenizer_pb2.EncodeResponse | None:
            answer = encode(text, request)
            self.num_encoded += answer is not None
            return answer

        def counted_takes(link: LocalDetokenizer, output: Output) -> bool:
            is_taken = takes(link, output)
            self.takes[output.request.resolved.model, is_taken] += 1
            return is_taken

        monkeypatch.setattr(LocalText, "encode", counted_encode)
        monkeypatch.setattr(LocalDetokenizer, "takes", counted_takes)
        monkeypatch.setattr(router_module, "LOAD_AFTER_S", 0.0)


@asynccontextmanager
async def with_text(folder: Path, **settings: object) -> AsyncIterator[RouterMesh]:
    async with router_mesh(tokenizer_path=folder, **settings) as mesh:  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while not mesh.router().has_text:
                await asyncio.sleep(0.005)
        yield mesh


def identity_of(folder: Path, name: str) -> common_pb2.ModelIdentity:
    vocabulary = Vocabulary.load(folder)
    return common_pb2.ModelIdentity(
        name=name,
        model_fingerprint=f"weights of {name}",
        tokenizer_fingerprint=vocabulary.fingerprint,
        sampler_version=1,
        vocab_size=vocabulary.vocab_size,
        max_total_len=512,
        eos_ids=pack_ints(vocabulary.identity.eos_ids),
    )


async def answers(client: AsyncClient, requests: Sequence[Asked]) -> list[object]:
    async def one(prompt: str | list[int], options: dict[str, object]) -> object:
        try:
            done = await client.complete(prompt, **options)  # type: ignore[arg-type]
        except RadixMeshError as error:
            return type(error), str(error)
        return done.prompt_ids, done.outputs

    async with asyncio.timeout(60):
        return [await one(*request) for request in requests]


def is_error(answer: object) -> bool:
    return isinstance(answer, tuple) and isinstance(answer[0], type)


@pytest.mark.parametrize("kind", sorted(SENTENCEPIECE_KINDS))
async def test_sentencepiece_gives_the_same_here_as_through_the_daemons(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte tokens, whole and torn, behind prompts that end in the middle of a character, and added tokens."""
    folder = write_folder(tmp_path / kind, SENTENCEPIECE_KINDS[kind]())
    identity, vocabulary = identity_of(folder, kind), Vocabulary.load(folder)
    rng = random.Random(kind)
    byte_ids = [i for i, token in enumerate(vocabulary.tokens) if token.startswith("<0x")]
    assert len(byte_ids) == 256
    requests: list[Asked] = []
    for number in range(_MANY):
        prompt: str | list[int] = rng.choice([*TEXTS, _ADDED, "日"])
        if number % 3 == 0:  # The first bytes of a character.
            prompt = [5, *(byte_ids[byte] for byte in "日".encode()[: 1 + number % 2])]
        options: dict[str, object] = {
            "seed": number,
            "n": 1 + number % 2,
            "max_tokens": 40,
            "skip_special_tokens": rng.choice([True, False]),
            "stop": ["e", "\ufffd\ufffd"] if number % 4 == 0 else [],
        }
        requests.append((prompt, options))
    async with router_mesh(model=folder, identity=identity) as mesh, mesh.client() as client:
        expected = await answers(client, requests)
    assert not any(map(is_error, expected))
    texts = [output.text for answer in expected for output in answer[1]]  # type: ignore[index]
    assert any("\ufffd" in text for text in texts) and any(text and "\ufffd" not in text for text in texts)
    here = Here(monkeypatch)
    async with with_text(folder, model=folder, identity=identity) as mesh, mesh.client() as client:
        await asyncio.gather(mesh.tokenizers[0].kill(), mesh.detokenizers[0].kill())
        assert await answers(client, requests) == expected
        assert here.num_encoded == sum(isinstance(prompt, str) for prompt, _ in requests)
        assert here.takes == {(kind, True): len(texts)}
        await mesh.settle()


def requests_to(*models: str) -> list[Asked]:
    return [
        (prompt, {"model": model, "seed": number, "max_tokens": 30})
        for number in range(3)
        for model in models
        for prompt in ("the end", [5, 6, 7 + number])
    ]


async def test_models_of_one_vocabulary_need_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, twin = requests_to("tiny-llama", "twin", ""), identity_of(TINY, "twin")
    counts = {"schedulers": 2, "other": (TINY, twin)}
    async with router_mesh(**counts) as mesh, mesh.client() as client:  # type: ignore[arg-type]
        expected = await answers(client, requests)
    here = Here(monkeypatch)
    async with with_text(TINY, **counts) as mesh, mesh.client() as client:
        await asyncio.gather(mesh.tokenizers[0].kill(), mesh.detokenizers[0].kill())
        assert await answers(client, requests) == expected
        assert all(fake.submits for fake in mesh.fakes)
        assert here.num_encoded == 9 and all(is_taken for _, is_taken in here.takes)


async def test_a_model_of_another_vocabulary_gets_no_ids_and_no_text_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of either go to a tokenizer, which knows whose they can be; ids go to a detokenizer of their own."""
    folder = write_folder(tmp_path / "other", SENTENCEPIECE_KINDS["bpe"]())
    requests = requests_to("tiny-llama", "other", "")
    counts = {"schedulers": 2, "detokenizers": 2, "other": (folder, identity_of(folder, "other"))}
    async with router_mesh(**counts) as mesh, mesh.client() as client:  # type: ignore[arg-type]
        expected = await answers(client, requests)
    refused = [request for request, answer in zip(requests, expected, strict=True) if is_error(answer)]
    assert [(prompt, options["model"]) for prompt, options in refused] == [("the end", "other")] * 3
    here = Here(monkeypatch)
    async with with_text(TINY, **counts) as mesh, mesh.client() as client:
        assert await answers(client, requests) == expected
        assert here.num_encoded == 0
        assert {model for model, is_taken in here.takes if is_taken} == {MODEL.name}
        assert here.takes["other", False] >= 3 and not here.takes["other", True]
        await mesh.settle()
