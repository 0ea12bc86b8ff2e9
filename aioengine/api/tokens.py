"""POST /tokenize and /detokenize."""

from aiohttp import web

from aioengine.api.answers import Text, Tokens
from aioengine.api.context import API
from aioengine.api.decoding import decode_body
from aioengine.api.errors import invalid, unsupported
from aioengine.api.outputs import json_response
from aioengine.api.prompts import context_of, encode_chat, encode_text
from aioengine.api.schema import DetokenizeBody, TokenizeBody


async def tokenize(request: web.Request) -> web.Response:
    api = request.app[API]
    body = decode_body(await request.read(), TokenizeBody)
    model = api.served_as(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    for name in ("chat_template", "tools", "documents"):
        if getattr(body, name) not in (None, []):
            raise unsupported(name)
    if body.messages is not None:
        token_ids = await encode_chat(api, model, body, body.messages)
    else:
        assert body.prompt is not None
        add_special = True if body.add_special_tokens is None else body.add_special_tokens
        token_ids = await encode_text(api, model, body.prompt, add_special)
    answer = Tokens(
        count=len(token_ids), max_model_len=context_of(api), tokens=token_ids, token_strs=None
    )
    if body.return_token_strs:
        answer.token_strs = await api.text.run(
            lambda: list(map(model.tokenizer.token_text, token_ids))
        )
    return json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    api = request.app[API]
    body = decode_body(await request.read(), DetokenizeBody)
    model = api.served_as(body.model)
    if body.tokens and max(body.tokens) >= model.config.vocab_size:
        raise invalid(
            f"tokens has id {max(body.tokens)}, the vocabulary has {model.config.vocab_size}",
            "tokens",
        )
    text = await api.text.run(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(Text(text))
