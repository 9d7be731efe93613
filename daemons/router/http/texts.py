"""/tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.body import Body
from radixmesh.daemons.router.http.chat_request import ChatMessage, ChatRequest
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.options import invalid
from radixmesh.daemons.router.http.prompts import Prompts, split_prompts
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2


class TokenizeRequest(Body):
    """Either prompt (a text, or several) or messages (a chat, encoded as /v1/chat/completions does)."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def items(self) -> list[tokenizer_pb2.EncodeItem]:
        """Raises MISSING_FIELD unless one of both is set, INVALID_CHAT."""
        if (self.prompt is None) == (self.messages is None):
            message = "set prompt or messages, and not both: what to encode"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "prompt"})
        if self.messages is not None:
            return [tokenizer_pb2.EncodeItem(chat=self._chat().chat)]
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt or []
        items = [tokenizer_pb2.EncodeItem(text=text) for text in texts]
        if self.add_special_tokens is not None:
            for item in items:
                item.add_special_tokens = self.add_special_tokens
        return items

    def _chat(self) -> router_pb2.GenerateRequest:
        fields = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        return ChatRequest.model_construct(**{name: getattr(self, name) for name in fields}).to_generate("")


class TokenizeEndpoint:
    """POST: {count, max_model_len, tokens}; tokens is a list of lists where prompt was a list."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body = await self._context.body.read(request, TokenizeRequest)
        wanted = router_pb2.TokenizeRequest(model=body.model or "", items=body.items())
        encoded = (await self._context.router.tokenize(wanted)).items
        for item in encoded:
            if item.HasField("error"):
                raise MeshError.from_proto(item.error)
        ids = [unpack_ints(item.ids, "ids").tolist() for item in encoded]
        served = self._context.router.schedulers.served(body.model or "")
        whole = {
            "count": sum(map(len, ids)),
            "max_model_len": served.identity.max_total_len if served is not None else None,
            "tokens": ids if isinstance(body.prompt, list) else ids[0],
        }
        return JSONResponse(whole, headers=body.ignored_headers())


class DetokenizeRequest(Body):
    """tokens: ids of one text, or of several."""

    model: str | None = None
    tokens: Prompts
    skip_special_tokens: bool | None = None


class DetokenizeEndpoint:
    """POST: {text}; a list of texts where tokens was a list of lists. Parts of characters show as U+FFFD."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        body = await self._context.body.read(request, DetokenizeRequest)
        lists = split_prompts(body.tokens, "tokens")
        if any(isinstance(ids, str) for ids in lists):
            raise invalid("tokens", "tokens holds texts: send ids, or lists of ids")
        is_single = not isinstance(body.tokens, list) or not body.tokens or not isinstance(body.tokens[0], list)
        wanted = tokenizer_pb2.DecodeRequest(ids=[ids.tobytes() for ids in lists if not isinstance(ids, str)])
        if body.skip_special_tokens is not None:
            wanted.skip_special_tokens = body.skip_special_tokens
        texts = list(await self._context.router.decode(wanted))
        return JSONResponse({"text": texts[0] if is_single else texts}, headers=body.ignored_headers())
