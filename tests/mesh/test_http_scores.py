"""/v1/score, /rerank, /classify, embeddings by choice and /flush_cache, against what transformers gives."""

from __future__ import annotations

import base64
import shutil
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from support.http import http_client
from support.llama_folders import TINY_LLAMA
from support.mesh import Mesh, running_mesh
from support.model_folders import random_model, save_model
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedModel

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUERY, DOCUMENTS = "The Tyger", ["Lorelei", "burning bright", "A traveller from an antique land", "Lorelei"]
TOLERANCE = 1e-4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scoring(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Mesh, PreTrainedModel, Tokenizer]]:
    """A mesh on a score head with one label, named by RADIXMESH_MODEL_FOLDER."""
    folder = tmp_path_factory.mktemp("models") / "reranker"
    tokenizer = Tokenizer.from_file(str(TINY_LLAMA / "tokenizer.json"))
    model = random_model("llama_scoring", vocab_size=tokenizer.get_vocab_size())
    save_model(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_LLAMA / name, folder / name)
    async with running_mesh("cpu", model="reranker", folder=folder) as mesh:
        yield mesh, model, tokenizer


def _expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[float]:
    with torch.inference_mode():
        return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in prompts]


def _sigmoid(values: list[float]) -> np.ndarray:
    return 1 / (1 + np.exp(-np.asarray(values)))


async def test_scores_are_those_of_transformers(scoring: tuple[Mesh, PreTrainedModel, Tokenizer]) -> None:
    mesh, model, tokenizer = scoring
    first = tokenizer.encode(QUERY).ids
    pairs = [first + tokenizer.encode(text, add_special_tokens=False).ids for text in DOCUMENTS]
    raw = _expected(model, pairs)
    async with http_client(mesh) as http:
        answer = await _post(http, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS, "activation": False})
        assert np.allclose([entry["score"] for entry in answer["data"]], raw, atol=TOLERANCE)
        answer = await _post(http, "/v1/score", {"text_1": [QUERY] * 4, "text_2": DOCUMENTS, "model": "reranker"})
        assert np.allclose([entry["score"] for entry in answer["data"]], _sigmoid(raw), atol=TOLERANCE)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))
        joined = _expected(model, [tokenizer.encode(text + QUERY).ids for text in DOCUMENTS])
        body = {"query": QUERY, "items": DOCUMENTS, "item_first": True, "activation": False}
        assert np.allclose((await _post(http, "/v1/score", body))["scores"], [[x] for x in joined], atol=TOLERANCE)
        # Equal documents stay in their order.
        order = sorted(range(4), key=lambda i: -raw[i])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = (await _post(http, path, {"query": QUERY, "documents": DOCUMENTS}))["results"]
            assert [entry["index"] for entry in results] == order
            assert [entry["document"]["text"] for entry in results] == [DOCUMENTS[i] for i in order]
            assert np.allclose(
                [e["relevance_score"] for e in results], _sigmoid([raw[i] for i in order]), atol=TOLERANCE
            )
        objects = [{"text": text} for text in DOCUMENTS]
        body = {"query": QUERY, "documents": objects, "top_n": 2, "return_documents": False}
        results = (await _post(http, "/rerank", body))["results"]
        assert [set(entry) for entry in results] == [{"index", "relevance_score"}] * 2
        classified = (await _post(http, "/classify", {"input": DOCUMENTS}))["data"]
        own = _expected(model, [tokenizer.encode(text).ids for text in DOCUMENTS])
        assert np.allclose([entry["probs"][0] for entry in classified], _sigmoid(own), atol=TOLERANCE)


async def test_bad_input_says_what_to_send(scoring: tuple[Mesh, PreTrainedModel, Tokenizer]) -> None:
    mesh, _, _ = scoring
    long = "word " * 4000
    cases: list[tuple[str, dict[str, object], int, str | None]] = [
        ("/v1/score", {}, 400, "text_1"),
        ("/v1/score", {"text_1": "a"}, 400, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, 400, "text_1"),
        ("/v1/score", {"query": "a", "items": []}, 400, "items"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": []}, 400, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1] * 65}, 400, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": ["b"] * 1000, "label_token_ids": [1, 2]}, 413, "items"),
        ("/v1/score", {"query": "a" * 100_000, "items": ["b"] * 1000}, 413, "items"),
        ("/rerank", {"query": long, "documents": ["b"] * 1000}, 413, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"] * 1025}, 400, "documents"),
        ("/rerank", {"query": "a"}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": [long]}, 400, "documents"),
        ("/classify", {"input": [[1, 999_999]]}, 400, "input"),
        ("/v1/completions", {"prompt": "a"}, 400, None),
    ]
    async with http_client(mesh) as http:
        for path, body, status, field in cases:
            answer = await http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, field) or field is None, (
                path,
                str(body)[:80],
                error,
            )
            assert answer.status_code == status, (path, error)
        assert mesh.bugs == []


async def test_labels_embeddings_and_the_flush_of_a_generating_model() -> None:
    torch.set_num_threads(1)
    oracle = LlamaForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(TINY_LLAMA / "tokenizer.json"))
    labels = [10, 77, 300]
    router = {"max_tokens_beyond_context": "refuse", "http_metrics": "false", "http_page": "false"}
    async with running_mesh("cpu", router=router) as mesh, http_client(mesh) as http:
        with torch.inference_mode():
            rows = [
                oracle(torch.tensor([tokenizer.encode(QUERY + text).ids])).logits[0, -1].float()
                for text in DOCUMENTS[:2]
            ]
        body = {"query": QUERY, "items": DOCUMENTS[:2], "label_token_ids": labels}
        whole = np.stack([torch.softmax(row, 0)[labels].numpy() for row in rows])
        assert np.allclose((await _post(http, "/v1/score", body))["scores"], whole, atol=TOLERANCE)
        among = np.stack([torch.softmax(row[labels], 0).numpy() for row in rows])
        assert np.allclose(
            (await _post(http, "/v1/score", {**body, "apply_softmax": True}))["scores"], among, atol=TOLERANCE
        )
        refused = await http.post("/rerank", json={"query": "a", "documents": ["b"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "UNSUPPORTED")

        plain = np.asarray((await _post(http, "/v1/embeddings", {"input": QUERY}))["data"][0]["embedding"])
        unit = (await _post(http, "/v1/embeddings", {"input": QUERY, "normalize": True}))["data"][0]["embedding"]
        assert np.allclose(unit, plain / np.linalg.norm(plain), atol=1e-6)
        few = {"input": QUERY, "dimensions": 8, "encoding_format": "base64"}
        cut = np.frombuffer(base64.b64decode((await _post(http, "/v1/embeddings", few))["data"][0]["embedding"]), "<f4")
        assert np.allclose(cut, plain[:8] / np.linalg.norm(plain[:8]), atol=1e-6)
        raw = (await _post(http, "/v1/embeddings", {"input": QUERY, "dimensions": 8, "normalize": False}))["data"][0]
        assert np.allclose(raw["embedding"], plain[:8])
        for dimensions in (0, len(plain) + 1):
            answer = await http.post("/v1/embeddings", json={"input": QUERY, "dimensions": dimensions})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")

        completion = {"prompt": QUERY, "max_tokens": 4, "temperature": 0}
        before = await _post(http, "/v1/completions", completion)
        cached = await _post(http, "/v1/completions", completion)
        assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        flushed = await http.post("/flush_cache")
        assert flushed.status_code == 200 and flushed.json()["flushed_pages"] > 0, flushed.text
        anew = await _post(http, "/v1/completions", completion)
        assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert anew["choices"] == before["choices"] == cached["choices"]
        # A page of another origin cannot: browsers say where a POST comes from.
        for name in ("origin", "sec-fetch-site"):
            assert (await http.post("/flush_cache", headers={name: "https://evil.example"})).status_code == 415
        assert (await http.post("/flush_cache?timeout=x")).json()["error"]["param"] == "timeout"
        assert (await http.get("/flush_cache")).status_code == 405

        large = await http.post("/v1/completions", json={**completion, "max_tokens": 100_000})
        error = large.json()["error"]
        assert (large.status_code, error["param"]) == (400, "max_tokens") and "too large: 100000" in error["message"]
        for path in ("/metrics", "/", "/mesh", "/docs", "/page/app.js"):
            assert (await http.get(path)).status_code == 404, path
        options = await http.request("OPTIONS", "/v1/completions")
        assert (options.status_code, options.headers["allow"]) == (204, "POST")
        assert not any(name.startswith("access-control") for name in options.headers)
        assert mesh.bugs == []


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> dict:  # type: ignore[type-arg]
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, (path, answer.text)
    return answer.json()
