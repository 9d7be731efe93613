"""Any server that speaks OpenAI's API: /v1/completions and /v1/chat/completions, streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence

import numpy as np

from radixmesh.cli.bench.load_turn import Prompt
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.targets.target import Target, TargetError, TargetOptions

try:
    import aiohttp
except ImportError as error:
    raise TargetError("loads over HTTP need aiohttp: pip install 'radixmesh[bench]'") from error

_Json = Mapping[str, object]
_EVENT_BYTES = 1 << 20
_MAX_ERROR_CHARS = 200


class OpenAITarget(Target):
    """base: ".../v1". Output tokens are the server's own count (stream_options.include_usage) where it gives one.

    Ids of outputs come only from servers that know return_token_ids.
    """

    def __init__(self, base: str, options: TargetOptions) -> None:
        self._base = base.rstrip("/")
        self._options = options
        self._model = options.model
        self._context: int | None = None
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(
                limit=0, ssl=options.tls.client_context() if options.tls.has_client else True
            ),
            timeout=aiohttp.ClientTimeout(total=options.timeout_s),
            read_bufsize=_EVENT_BYTES,
        )

    @property
    def model(self) -> str:
        return self._model

    @property
    def context(self) -> int | None:
        return self._context

    async def prepare(self) -> int | None:
        try:
            async with self._session.get(f"{self._base}/models") as response:
                content = await response.json() if response.ok else None
                status = f"{response.status} {response.reason}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TargetError(f"{self._base} does not answer: {_describe(error)}") from error
        if content is None:
            raise TargetError(f"{self._base}/models answers {status}: the target ends in /v1, is that right?")
        models = {str(m.get("id", "")): m for m in content.get("data", ()) if isinstance(m, dict)}
        names = list(models)
        if self._model and self._model not in names:
            raise TargetError(f"there is no model {self._model!r}; served: {', '.join(names) or 'none'}")
        if not names:
            raise TargetError(f"{self._base} serves no model")
        self._model = self._model or names[0]
        # vLLM and SGLang tell the context too; the vocabulary ours alone.
        context, size = (models[self._model].get(name) for name in ("max_model_len", "vocab_size"))
        self._context = context if isinstance(context, int) and context > 0 else None
        return size if isinstance(size, int) else None

    async def send(self, prompt: Prompt, out_len: int, record: RequestRecord) -> None:
        is_chat = prompt.messages is not None
        url = f"{self._base}/{'chat/completions' if is_chat else 'completions'}"
        try:
            async with self._session.post(url, json=self._body(prompt, out_len)) as response:
                if not response.ok:
                    record.end(_error_text(await response.text(), response.status))
                    return
                await self._read(response, record)
        except TimeoutError:
            record.end(f"no end within {self._options.timeout_s:g} s")
        except aiohttp.ClientError as error:
            record.end(_describe(error))

    async def close(self) -> None:
        await self._session.close()

    def _body(self, prompt: Prompt, out_len: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self._options.temperature,
        }
        if prompt.messages is not None:
            # OpenAI's own API takes only the newer name, older servers only the older one.
            limit = "max_completion_tokens" if self._options.is_plain else "max_tokens"
            body |= {"messages": list(prompt.messages), limit: out_len}
        else:
            body |= {"prompt": prompt.text if prompt.ids is None else prompt.ids.tolist(), "max_tokens": out_len}
        if not self._options.is_plain:
            body |= {"ignore_eos": self._options.ignores_eos, "return_token_ids": True}
        return body

    async def _read(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        ids: list[int] = []
        is_whole = False
        async for text in _events(response):
            if text == "[DONE]":
                is_whole = True
                break
            event = json.loads(text)
            if "error" in event:
                record.end(_error_text(text, 200))
                return
            _take_usage(event.get("usage"), record)
            for choice in event.get("choices", ()):
                is_whole = is_whole or choice.get("finish_reason") is not None
                _take_choice(choice, record, ids)
        record.output_ids = np.array(ids, dtype=np.int32) if ids else None
        record.end("" if is_whole else "the stream broke off")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of server-sent events, one line each, as this API writes them."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


def _take_choice(choice: _Json, record: RequestRecord, ids: list[int]) -> None:
    delta = choice.get("delta")
    source: _Json = delta if isinstance(delta, Mapping) else choice
    text = next((value for key in ("text", "content", "reasoning_content") if (value := source.get(key))), "")
    new_ids = choice.get("token_ids")
    num_ids = len(new_ids) if isinstance(new_ids, Sequence) else 0
    if isinstance(new_ids, Sequence):
        ids.extend(int(str(id)) for id in new_ids)
    if text or num_ids:
        record.deliver(num_ids or 1)
        record.output_text += str(text)


def _take_usage(usage: object, record: RequestRecord) -> None:
    if not isinstance(usage, Mapping):
        return
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else 0
    record.count(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0), int(cached or 0))


def _error_text(body: str, status: int) -> str:
    """The message of an error in OpenAI's form, or the body's beginning."""
    try:
        error = json.loads(body).get("error", body)
        message = error.get("message", body) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        message = body
    return f"{status}: {str(message).strip()[:_MAX_ERROR_CHARS]}"


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
