"""Forms of the fields that are kept as bytes until they are counted, for /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping

Schema = dict[str, object]

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_WHOLE: Schema = {"type": "integer"}
_FLAG: Schema = {"type": "boolean"}


def _list_of(entry: Schema) -> Schema:
    return {"type": "array", "items": entry}


_TEXTS, _IDS, _OBJECTS = _list_of(_TEXT), _list_of(_WHOLE), _list_of(_OBJECT)
_PROMPT = (_TEXT, _TEXTS, _IDS, _list_of(_IDS))
_TEXT_OR_OBJECT = (_TEXT, _OBJECT)
_DOCUMENTS = (_TEXT, _OBJECT, _list_of({"type": ["string", "object"]}))
_BLOCKS = (_TEXT, _OBJECTS)

# By field; what the same name means on one route alone goes before it.
_FORMS: Mapping[str, tuple[Schema, ...]] = {
    **dict.fromkeys(("messages", "tools"), (_OBJECTS,)),
    **dict.fromkeys(("prompt", "input", "text", "input_ids"), _PROMPT),
    **dict.fromkeys(("stop", "stop_sequences"), (_TEXT, _TEXTS)),
    **dict.fromkeys(("stop_token_ids",), (_IDS,)),
    **dict.fromkeys(("seed", "sampling_seed"), (_WHOLE,)),
    **dict.fromkeys(("regex", "ebnf", "guided_regex", "guided_grammar", "instructions"), (_TEXT,)),
    **dict.fromkeys(("structural_tag", "format", "tool_choice"), _TEXT_OR_OBJECT),
    **dict.fromkeys(("logit_bias", "stream_options", "response_format", "structured_outputs"), (_OBJECT,)),
    **dict.fromkeys(
        ("chat_template_kwargs", "thinking", "output_config", "options", "reasoning", "metadata"), (_OBJECT,)
    ),
    # true is a schema too.
    **dict.fromkeys(("json_schema", "guided_json"), (*_TEXT_OR_OBJECT, _FLAG)),
    "sampling_params": (_OBJECT, _OBJECTS),
    "guided_json_object": (_FLAG,),
    **dict.fromkeys(("guided_choice", "include"), (_TEXTS,)),
    "system": _BLOCKS,
    "think": (_FLAG, _TEXT),
    "tokens": (_IDS, _list_of(_IDS)),
    **dict.fromkeys(("text_1", "text_2", "query", "items", "documents"), _DOCUMENTS),
}
_OF_BODY: Mapping[tuple[str, str], tuple[Schema, ...]] = {
    ("ResponsesRequest", "input"): _BLOCKS,
    ("ResponsesRequest", "text"): (_OBJECT,),
    **{("OllamaGenerateRequest", name): (_TEXT,) for name in ("prompt", "system")},
    ("MessagesRequest", "tool_choice"): (_OBJECT,),
    ("CountTokensRequest", "tool_choice"): (_OBJECT,),
}


def schema_of_raw(body: str, field: str, *, may_be_null: bool) -> Schema:
    """The JSON schema of a field. body: the name of its type. {} for one that is not listed."""
    forms = _OF_BODY.get((body, field)) or _FORMS.get(field, ())
    if not forms:
        return {}
    forms = (*forms, {"type": "null"}) if may_be_null else forms
    return {"anyOf": list(forms)} if len(forms) > 1 else forms[0]
