"""litellm as its users call it: as OpenAI's API at another address, and as a vLLM server."""

import asyncio
from typing import Any

import litellm
import pytest
from served import KEY, MODEL, PROMPT, QUESTION, URL, V1, chat, completion

SERVER = {"api_base": V1, "api_key": KEY}
PROVIDERS = ["openai", "hosted_vllm"]
TEXT_PROVIDERS = ["text-completion-openai", "hosted_vllm"]
GREEDY = {"max_tokens": 16, "temperature": 0}
DRAWN = {"max_tokens": 16, "temperature": 1.0, "seed": 7}


def ask(provider: str, **fields: Any) -> Any:
    return litellm.completion(f"{provider}/{MODEL}", **{"messages": QUESTION, **SERVER, **fields})


def ask_text(provider: str, **fields: Any) -> Any:
    fields = {"prompt": PROMPT, **SERVER, **fields}
    return litellm.text_completion(model=f"{provider}/{MODEL}", **fields)


def counts(usage: Any) -> list[int]:
    """Of a litellm object, or of plain JSON."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return [usage[name] for name in names]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("fields", [GREEDY, {**DRAWN, "n": 2}], ids=["greedy", "drawn"])
def test_whole_and_streamed(provider: str, fields: dict[str, Any]) -> None:
    wanted = chat(**fields)
    whole = ask(provider, **fields)
    assert [choice.message.content for choice in whole.choices] == contents(wanted)
    assert [choice.finish_reason for choice in whole.choices] == reasons(wanted)
    assert counts(whole.usage) == counts(wanted["usage"])
    options = {"include_usage": True}
    chunks = list(ask(provider, **fields, stream=True, stream_options=options))
    texts = [""] * len(wanted["choices"])
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == contents(wanted)
    assert counts(chunks[-1].usage) == counts(wanted["usage"])
    if len(texts) == 1:
        rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
        assert rebuilt.choices[0].message.content == texts[0]
        assert rebuilt.choices[0].finish_reason == reasons(wanted)[0]
        assert counts(rebuilt.usage) == counts(wanted["usage"])


def contents(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def reasons(answer: dict[str, Any]) -> list[str]:
    return [choice["finish_reason"] for choice in answer["choices"]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_async(provider: str) -> None:
    fields = {"model": f"{provider}/{MODEL}", "messages": QUESTION, **SERVER, **GREEDY}

    async def ask_twice() -> tuple[str, str]:
        async with asyncio.TaskGroup() as tasks:
            whole = tasks.create_task(litellm.acompletion(**fields))
            stream = await litellm.acompletion(**fields, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.result().choices[0].message.content, "".join(parts)

    (wanted,) = contents(chat(**GREEDY))
    assert asyncio.run(ask_twice()) == (wanted, wanted)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(provider: str, stream: bool) -> None:
    fields = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    wanted = chat(**fields)["choices"][0]["logprobs"]["content"]
    if stream:
        found = [
            token
            for chunk in ask(provider, **fields, stream=True)
            if (part := getattr(chunk.choices[0], "logprobs", None))
            for token in part["content"]
        ]
    else:
        found = ask(provider, **fields).choices[0].logprobs.content
    assert [token["token"] for token in found] == [token["token"] for token in wanted]
    assert [token["logprob"] for token in found] == pytest.approx(
        [token["logprob"] for token in wanted], abs=1e-4
    )
    assert {len(token["top_logprobs"]) for token in found} == {3}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_fields_of_vllm(provider: str) -> None:
    """Which litellm hands on as they are."""
    (greedy,) = contents(chat(**GREEDY))
    nearest = ask(provider, max_tokens=16, temperature=1.0, top_k=1, min_p=0.0)
    assert nearest.choices[0].message.content == greedy
    long = ask(provider, max_tokens=200, min_tokens=200, ignore_eos=True, temperature=0)
    assert long.usage.completion_tokens == 200
    first_id = chat(max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    stopped = ask(provider, **GREEDY, stop_token_ids=[first_id])
    assert (stopped.choices[0].message.content, stopped.usage.completion_tokens) == ("", 1)
    wanted = contents(chat(**GREEDY, repetition_penalty=1.5))
    assert wanted != [greedy]
    found = ask(provider, **GREEDY, repetition_penalty=1.5)
    assert [found.choices[0].message.content] == wanted
    extra = ask(provider, **GREEDY, extra_body={"repetition_penalty": 1.5})
    assert [extra.choices[0].message.content] == wanted


@pytest.mark.parametrize("provider", PROVIDERS)
def test_stop(provider: str) -> None:
    found = ask(provider, max_tokens=48, temperature=0, stop=["concept in"])
    assert found.choices[0].message.content == "Gravity is a fundamental "
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_several_turns(provider: str) -> None:
    """What other servers' clients put into a conversation; parts of a content."""
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is gravity?"}]},
        ask(provider, **GREEDY).choices[0].message,
        {"role": "user", "content": "And what is light?", "name": "Ann"},
    ]
    found = ask(provider, **GREEDY, messages=turns, user="ann", metadata={"team": "a"})
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens > chat(**GREEDY)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("provider", TEXT_PROVIDERS)
def test_text(provider: str) -> None:
    prompts = [PROMPT, "Once upon a time"]
    wanted = [completion(prompt=prompt, max_tokens=8)["choices"][0]["text"] for prompt in prompts]
    whole = ask_text(provider, max_tokens=8, temperature=0)
    assert whole.choices[0].text == wanted[0]
    assert "Paris" in wanted[0]
    assert counts(whole.usage) == counts(completion(max_tokens=8)["usage"])
    chunks = list(ask_text(provider, max_tokens=8, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == wanted[0]
    both = ask_text(provider, prompt=prompts, max_tokens=8, temperature=0)
    assert [choice.text for choice in both.choices] == wanted


@pytest.mark.parametrize("provider", TEXT_PROVIDERS)
def test_scored_prompt(provider: str) -> None:
    fields = {"max_tokens": 1, "echo": True, "logprobs": 1}
    wanted = completion(**fields)["choices"][0]
    (found,) = ask_text(provider, temperature=0, **fields).choices
    assert found.text == wanted["text"]
    assert found.logprobs.tokens == wanted["logprobs"]["tokens"]
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(
        wanted["logprobs"]["token_logprobs"][1:], abs=1e-4
    )


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
FAILURES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": -1}, litellm.BadRequestError, "temperature"),
    ({"tools": TOOLS}, litellm.BadRequestError, "tools is not supported"),
    ({"api_key": "wrong"}, litellm.AuthenticationError, "API key"),
    ({"max_tokens": 10**6}, litellm.ContextWindowExceededError, "max_tokens"),
    (
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        *(litellm.ContextWindowExceededError, "messages has"),
    ),
    (
        {"messages": [{"role": "user", "content": "word " * 100_000}]},
        *(litellm.ContextWindowExceededError, "messages has"),
    ),
]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "message"), FAILURES)
def test_errors_are_typed(
    provider: str, stream: bool, fields: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as raised:
        ask(provider, **fields, stream=stream)
    assert type(raised.value) is kind


@pytest.mark.parametrize("provider", PROVIDERS)
def test_absent_models_and_routes(provider: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="gpt-x"):
        litellm.completion(f"{provider}/gpt-x", messages=QUESTION, **SERVER)
    with pytest.raises(litellm.NotFoundError, match="there is no route /v1/embeddings"):
        litellm.embedding(f"{provider}/{MODEL}", input=["Hello"], **SERVER)


def test_a_router_falls_back() -> None:
    """To another deployment, for a prompt that is too long for the first."""
    deployments = [
        {"model_name": name, "litellm_params": {"model": f"openai/{MODEL}", **SERVER, **fields}}
        for name, fields in {"short": {"max_tokens": 10**6}, "long": GREEDY}.items()
    ]
    router = litellm.Router(deployments, context_window_fallbacks=[{"short": ["long"]}])
    found = router.completion("short", messages=QUESTION)
    assert [found.choices[0].message.content] == contents(chat(**GREEDY))


def test_models_are_listed() -> None:
    provider = "hosted_vllm"
    models = litellm.get_valid_models(True, provider, api_key=KEY, api_base=URL)
    assert models == [MODEL]
