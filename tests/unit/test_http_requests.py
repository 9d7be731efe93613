"""HTTP bodies made into the router's requests, and what becomes of them on the way back."""

from __future__ import annotations

import json
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_requests import new_request
from support.small_tokenizers import TEXTS, byte_level, vocabulary_of

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.answers.collected import CollectedRequest, LogprobRun
from radixmesh.daemons.router.http.answers.logprobs import (
    MAX_PROMPT_ENTRIES,
    CompletionLogprobs,
    chat_logprobs,
    check_prompt_entries,
    prompt_logprobs,
)
from radixmesh.daemons.router.http.answers.tokens import TokenTable
from radixmesh.daemons.router.http.answers.usage import usage_of
from radixmesh.daemons.router.http.bodies.body import parse, parse_whole
from radixmesh.daemons.router.http.bodies.field_decoders import decoders_of
from radixmesh.daemons.router.http.bodies.json_text import dump, split_at
from radixmesh.daemons.router.http.errors import ErrorResponse, error_body, http_status
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.native_request import NativeRequest
from radixmesh.daemons.router.http.request_types.prompts import name_requests
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal
from radixmesh.daemons.router.requests.updates import Delta, Finished, Logprobs, Update
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime import sampling
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.model_folder.token_bytes import token_bytes
from radixmesh.router.v1 import router_pb2


def completion(**fields: object) -> router_pb2.GenerateRequest:
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest).to_template()


def native(**fields: object) -> router_pb2.GenerateRequest:
    (request,) = parse(json.dumps({"text": "x", **fields}).encode(), NativeRequest).to_messages({})
    request.ClearField("text")
    return request


def test_absent_and_null_options_stay_unset() -> None:
    nulls = {name: None for name in decoders_of(CompletionRequest) if name not in ("prompt", "max_tokens")}
    for request in (completion(), completion(**nulls)):
        assert request.stop == common_pb2.StopParams(max_tokens=16)
        assert not request.HasField("n") and not request.HasField("deadline_ms")
        assert request.sampling == common_pb2.SamplingParams()


def test_every_option_has_its_place() -> None:
    request = completion(
        model="m", n=3, temperature=0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=2, seed=0, stop="end", stop_token_ids=[4, 5], logit_bias={"7": 1.5, "9": -100}, min_tokens=2,
        max_tokens=9, ignore_eos=True, include_stop_str_in_output=False, skip_special_tokens=False, logprobs=0,
        cache_salt="s", priority=-3, tenant="t", deadline_ms=5, ttft_deadline_ms=6, prompt_cache_key="c",
    )  # fmt: skip
    assert request == router_pb2.GenerateRequest(
        model="m", n=3, cache_salt="s", priority=-3, tenant="t", deadline_ms=5, ttft_deadline_ms=6, session="c",
        sampling=common_pb2.SamplingParams(
            temperature=0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
            repetition_penalty=2, seed=0, num_top_logprobs=0, logit_bias_ids=pack_ints([7, 9]),
            logit_bias_values=pack_floats([1.5, -100]),
        ),
        stop=common_pb2.StopParams(
            max_tokens=9, min_tokens=2, stop=["end"], stop_ids=pack_ints([4, 5]), ignore_eos=True, include_stop=False,
            skip_special_tokens=False,
        ),
    )  # fmt: skip
    same = native(
        sampling_params={
            "n": 3, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "frequency_penalty": 0.5,
            "presence_penalty": -0.5, "repetition_penalty": 2, "sampling_seed": 0, "stop": ["end"],
            "stop_token_ids": [4, 5], "logit_bias": {"7": 1.5, "9": -100}, "min_new_tokens": 2, "max_new_tokens": 9,
            "ignore_eos": True, "no_stop_trim": False, "skip_special_tokens": False,
        },
        model="m", return_logprob=True, cache_salt="s", priority=-3, tenant="t", deadline_ms=5,
        ttft_deadline_ms=6, prompt_cache_key="c",
    )  # fmt: skip
    assert same == request


@given(st.integers(-(2**63), 2**64 - 1))
def test_any_64_bit_number_is_a_seed(seed: int) -> None:
    assert completion(seed=seed).sampling.seed == seed % 2**64


def test_prompt_logprobs_come_with_echo_or_a_start() -> None:
    assert completion(echo=True, logprobs=1).sampling.prompt_logprobs
    assert not completion(echo=True).sampling.HasField("prompt_logprobs")
    assert completion(echo=True, max_tokens=0, logprobs=1).stop.max_tokens == 1
    assert native(return_logprob=True, logprob_start_len=0).sampling.prompt_logprobs
    assert not native(return_logprob=True, logprob_start_len=-1).sampling.HasField("prompt_logprobs")
    assert not native(logprob_start_len=0).sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], [[]]),
        ([[]], [[]]),
    ],
)
def test_forms_of_prompts(prompt: object, expected: list[object]) -> None:
    body = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    requests = list(body.to_messages({}))
    name_requests(requests, "id")
    found = [
        unpack_ints(r.prompt_ids, "ids").tolist() if r.WhichOneof("input") == "prompt_ids" else r.text for r in requests
    ]
    assert found == expected
    names = ["id"] if len(expected) == 1 else [f"id-{i}" for i in range(len(expected))]
    assert [request.request_id for request in requests] == names


@pytest.mark.parametrize("prompt", [None, 5, True, {}, [True], ["a", 1], [1, "a"], [[1], 2], [[True]], [2**31], [1.0]])
def test_what_is_no_prompt(prompt: object) -> None:
    body = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    with pytest.raises(MeshError) as raised:
        list(body.to_messages({}))
    assert raised.value.metadata["field"] == "prompt"


def test_chats_reach_the_template_whole() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "\u00e9"]}}}
    sent = {**call, "function": {"name": "f", "arguments": json.dumps(call["function"]["arguments"])}}  # type: ignore[index]
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [sent]},
            {"role": "tool", "content": "42", "tool_call_id": "c"},
        ],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 5,
        "max_completion_tokens": 7,
    }
    request = parse(json.dumps(body).encode(), ChatRequest).to_generate()
    assert [message.content for message in request.chat.messages] == ["ab", "", "42"]
    assert json.loads(request.chat.messages[1].extra_json) == {"tool_calls": [call]}
    assert json.loads(request.chat.messages[2].extra_json) == {"tool_call_id": "c"}
    assert json.loads(request.chat.tools_json) == tools
    assert json.loads(request.chat.template_args_json) == {"enable_thinking": False}
    assert request.stop.max_tokens == 7
    assert not request.chat.HasField("add_generation_prompt")


@given(st.binary(max_size=60))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    try:
        parse_whole(data, CompletionRequest, {})
    except MeshError as error:
        assert error.status in ("INVALID_ARGUMENT", "UNIMPLEMENTED") and error.message


@pytest.mark.parametrize("name", [name for name in ErrorReason.keys() if name != "ERROR_REASON_UNSPECIFIED"])  # noqa: SIM118
def test_every_reason_has_a_status(name: str) -> None:
    error = MeshError(ErrorReason.Value(name), "what to do", {"field": "f"})
    status = http_status(error)
    assert status in (400, 401, 403, 404, 408, 409, 413, 429, 499, 500, 503)
    body = error_body(error)["error"]
    assert isinstance(body, dict)
    code = name.removeprefix("ERROR_REASON_")
    # Those that libraries know by OpenAI's names.
    openais = {"PROMPT_TOO_LONG": "context_length_exceeded", "UNKNOWN_MODEL": "model_not_found"}
    assert body["code"] == openais.get(code, code)
    assert body["param"] == "f"
    assert ("retry-after" in ErrorResponse(error).headers) == (status in (429, 503))


def test_retry_after_is_whole_seconds() -> None:
    error = MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "later", {"retry_after_ms": "1200"})
    assert ErrorResponse(error).headers["retry-after"] == "2"


@given(st.text(), st.text(min_size=1))
def test_text_between_the_halves_is_the_whole_json(text: str, mark: str) -> None:
    before, after = split_at({"id": "fixed", "deep": [{"text": f"{mark} mark"}]}, f"{mark} mark")
    value = json.loads(before + dump(text) + after)
    assert value == {"id": "fixed", "deep": [{"text": text}]}


def test_usage_counts_a_prompt_once() -> None:
    def ended(cached: int) -> Finished:
        stop = FinishReason.STOP
        return Finished(index=0, reason=stop, num_output=3, prompt_tokens=10, cached_tokens=cached)

    total = usage_of([(0, ended(0)), (0, ended(9)), (1, ended(4))]).to_json()
    assert (total["prompt_tokens"], total["completion_tokens"], total["total_tokens"]) == (20, 9, 29)
    assert total["prompt_tokens_details"] == {"cached_tokens": 13}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_deltas_in_any_split_collect_to_the_same(counts: list[int]) -> None:
    num = sum(counts)
    ids = list(range(num))
    tops = [[100 + i, 200 + i] for i in ids]
    collected = CollectedRequest()
    collected.add(Update(resolved=new_request("r", Delivery(Journal(1 << 20), WakeupPacer())).resolved))
    first = 0
    for count in counts:
        part = slice(first, first + count)
        first += count
        logprobs = Logprobs(
            token_logprobs=pack_floats([-float(i) for i in ids[part]]), num_top=2,
            top_ids=pack_ints([i for top in tops[part] for i in top]), top_logprobs=pack_floats([0.5] * 2 * count),
        )  # fmt: skip
        delta = Delta(0, part.start, part.start, pack_ints(ids[part]), "x" * count, logprobs=logprobs)
        collected.add(Update(deltas=[delta]))
    (output,) = collected.outputs
    assert (list(output.ids), output.text) == (ids, "x" * num)
    assert [[token for token, _ in output.logprobs.top(i)] for i in ids] == tops
    assert list(output.logprobs.values) == [-float(i) for i in ids]


def test_a_failed_output_raises_its_error() -> None:
    error = MeshError(ErrorReason.ERROR_REASON_NEVER_FITS, "ask for less")
    finished = Finished(index=0, reason=FinishReason.ERROR, error=error)
    with pytest.raises(MeshError) as raised:
        CollectedRequest().add(Update(finished=[finished]))
    assert raised.value.reason == ErrorReason.ERROR_REASON_NEVER_FITS


def test_prompt_logprobs_are_bounded_by_tokens_and_alternatives() -> None:
    table = TokenTable([b"a", b"b"], ())
    of_prompt = LogprobRun(values=array("f", [-1.0, -2.0]), num_top=1, top_ids=array("i", [1, 1]))
    of_prompt.top_values = array("f", [-0.5, -2.0])
    told = json.loads(bytes(prompt_logprobs([0, 0, 1], of_prompt, table)))
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert told == [
        None,
        {"1": best, "0": {"logprob": -1.0, "rank": None, "decoded_token": "a"}},
        {"1": {**best, "logprob": -2.0}},
    ]
    check_prompt_entries(MAX_PROMPT_ENTRIES // 64, 63)
    with pytest.raises(MeshError) as raised:
        check_prompt_entries(MAX_PROMPT_ENTRIES // 64 + 1, 63)
    assert raised.value.reason_name == "TOO_LARGE" and raised.value.metadata["field"] == "prompt_logprobs"


def test_token_bytes_join_to_the_text() -> None:
    vocabulary = vocabulary_of(byte_level())
    table = TokenTable(token_bytes(vocabulary), vocabulary.special_ids)
    for text in TEXTS:
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(table.data, ids)).decode() == text
        form = CompletionLogprobs(table, skips_special=True)
        run = LogprobRun.of(common_pb2.Logprobs(token_logprobs=pack_floats(np.zeros(len(ids)).tolist())))
        offsets = form.of(ids, run)["text_offset"]
        assert isinstance(offsets, list)
        for index, offset in enumerate(offsets):
            whole = b"".join(map(table.data, ids[:index]))
            assert offset == len(whole.decode("utf-8", "ignore"))
        content = chat_logprobs(ids, run, table)["content"]
        assert isinstance(content, list)
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text


def test_a_small_body_is_kept_without_what_is_in_its_messages() -> None:
    data = json.dumps({"prompt": "tiger", "max_tokens": 3, "stop": ["x"], "stream_options": {"include_usage": False}})
    parsed = parse_whole(data.encode(), CompletionRequest, {})
    assert parsed.messages[0].text == "tiger"
    assert list(parsed.messages[0].stop.stop) == ["x"]
    assert parsed.body.max_tokens == 3
    assert (parsed.body.prompt, parsed.body.stop, parsed.body.stream_options) == (None, None, None)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"stop": [""]}, {"top_p": 2.0}])
def test_wrong_options_are_refused_each_time(options: dict[str, object]) -> None:
    data = json.dumps({"prompt": "tiger", **options}).encode()
    for _ in range(2):  # Right ones are remembered.
        with pytest.raises(MeshError) as refused:
            parse_whole(data, CompletionRequest, {})
        assert refused.value.metadata["field"].rpartition(".")[2] in options


def test_options_that_are_remembered_are_bounded_and_without_seeds() -> None:
    for number in range(2000):
        sampling.sampling_from_proto(common_pb2.SamplingParams(top_k=number))
        sampling.stop_from_proto(common_pb2.StopParams(stop=[str(number)]))
    kept = sampling.known_sampling.cache_info(), sampling.known_stop.cache_info()
    assert all(info.currsize == info.maxsize == 512 for info in kept)
    for seed in range(10):
        assert sampling.sampling_from_proto(common_pb2.SamplingParams(seed=seed)).seed == seed
    assert sampling.known_sampling.cache_info().misses == kept[0].misses + 1, "seeds are not among what is remembered"
    assert sampling.stop_from_proto(common_pb2.StopParams(stop=["x" * 200])).stop == ("x" * 200,)
    assert sampling.known_stop.cache_info() == kept[1], "not looked up"
    biased = common_pb2.SamplingParams(logit_bias_ids=pack_ints([5]), logit_bias_values=pack_floats([1]))
    stopped = common_pb2.StopParams(stop=["a"], stop_ids=pack_ints([5]))
    # Requests share them: frozen, as deep as they go.
    hash((sampling.sampling_from_proto(biased), sampling.stop_from_proto(stopped)))
