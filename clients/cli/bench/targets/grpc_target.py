"""A mesh, by our own client: it counts tokens itself and resumes unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixmesh.cli.bench.load_turn import Prompt
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.targets.target import Target, TargetError, TargetOptions
from radixmesh.client import AsyncClient, RadixMeshError
from radixmesh.daemons.runtime.errors import MeshError

if TYPE_CHECKING:
    from radixmesh.client.options import Options


class GrpcTarget(Target):
    """routers: addresses; requests take turns. What is still kept of a request that was resumed counts as delivered."""

    def __init__(self, routers: Sequence[str], options: TargetOptions) -> None:
        try:
            self._client = AsyncClient(routers, api_key=options.api_key, tls=options.tls)
        except (MeshError, ValueError) as error:
            raise TargetError(str(error)) from error
        self._options = options
        self._model = options.model
        self._context: int | None = None

    @property
    def model(self) -> str:
        return self._model

    @property
    def context(self) -> int | None:
        return self._context

    async def prepare(self) -> int | None:
        try:
            models = await self._client.models()
        except RadixMeshError as error:
            raise TargetError(str(error)) from error
        for model in models:
            if self._options.model in ("", model.name):
                self._model = model.name
                self._context = model.max_total_len or None
                return model.vocab_size or None
        names = ", ".join(model.name for model in models) or "none yet"
        raise TargetError(f"there is no model {self._options.model!r}; served: {names}")

    async def send(self, prompt: Prompt, out_len: int, record: RequestRecord) -> None:
        options: Options = {
            "model": self._model,
            "temperature": self._options.temperature,
            "max_tokens": out_len,
            "ignore_eos": self._options.ignores_eos,
            "ids_only": self._options.is_ids_only and prompt.messages is None,
        }
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._stream(prompt, options, record)
        except RadixMeshError as error:
            record.end(error.reason)
        except TimeoutError:
            record.end(f"no end within {self._options.timeout_s:g} s")

    async def close(self) -> None:
        await self._client.close()

    async def _stream(self, prompt: Prompt, options: Options, record: RequestRecord) -> None:
        given = prompt.text if prompt.ids is None else prompt.ids.tolist()
        stream = self._client.generate(given, messages=prompt.messages, **options)
        ids: list[int] = []
        error = ""
        try:
            async for chunk in stream:
                if chunk.ids:
                    record.deliver(len(chunk.ids))
                    ids += chunk.ids
                record.output_text += chunk.text
                if chunk.finish is not None:
                    usage = chunk.finish.usage
                    record.count(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
                    error = "aborted" if chunk.finish.reason == "abort" else ""
        finally:
            record.num_resumptions = stream.num_resumptions
            await stream.aclose()
        record.output_ids = np.array(ids, dtype=np.int32)
        record.end(error)
