"""langchain-openai as its users call it."""

import asyncio
from typing import Any

import langchain_core.exceptions
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from served import KEY, MODEL, PROMPT, V1, ask, chat, completion

SERVER = {"base_url": V1, "api_key": KEY, "model": MODEL}
GREEDY = {"max_tokens": 16, "temperature": 0}
QUESTIONS = ["What is gravity?", "What is light?", "Who was Ada Lovelace?"]


def chat_model(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(**{**SERVER, **GREEDY, **fields})


def text_model(**fields: Any) -> OpenAI:
    return OpenAI(**{**SERVER, **GREEDY, **fields})


def answers(questions: list[str] = QUESTIONS) -> list[str]:
    return [
        chat(messages=[{"role": "user", "content": question}], max_tokens=16)["choices"][0][
            "message"
        ]["content"]
        for question in questions
    ]


def texts(prompts: list[str]) -> list[str]:
    return [completion(prompt=prompt, max_tokens=16)["choices"][0]["text"] for prompt in prompts]


# --- chat ----------------------------------------------------------------------------------------


def test_invoke() -> None:
    wanted = chat(max_tokens=16)
    found = chat_model().invoke(QUESTIONS[0])
    assert found.content == wanted["choices"][0]["message"]["content"]
    assert found.id
    assert found.response_metadata["finish_reason"] == "length"
    assert found.response_metadata["model_name"] == MODEL
    assert found.response_metadata["id"].startswith("chatcmpl-")
    assert found.usage_metadata is not None
    assert found.usage_metadata["input_tokens"] == wanted["usage"]["prompt_tokens"]
    assert found.usage_metadata["output_tokens"] == 16
    assert found.usage_metadata["total_tokens"] == wanted["usage"]["total_tokens"]


def test_cached_tokens() -> None:
    model = chat_model(max_tokens=1)
    question = "Tell me about the sea. " * 10
    model.invoke(question)
    again = model.invoke(question).usage_metadata
    assert again is not None
    assert again["input_token_details"]["cache_read"] >= 16


def test_stream() -> None:
    (wanted,) = answers(QUESTIONS[:1])
    whole = None
    num_chunks = 0
    for chunk in chat_model(stream_usage=True).stream(QUESTIONS[0]):
        whole = chunk if whole is None else whole + chunk
        num_chunks += 1
    assert whole is not None
    assert whole.content == wanted
    assert num_chunks > 10
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.response_metadata["model_name"] == MODEL
    assert whole.chunk_position == "last"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 16
    chunks = list(chat_model().stream(QUESTIONS[0]))
    assert "".join(chunk.content for chunk in chunks) == wanted
    assert all(chunk.usage_metadata is None for chunk in chunks)


def test_batch() -> None:
    wanted = answers()
    assert [found.content for found in chat_model().batch(QUESTIONS)] == wanted
    streaming = chat_model(streaming=True)
    assert [found.content for found in streaming.batch(QUESTIONS)] == wanted


def test_async() -> None:
    wanted = answers()

    async def run() -> list[Any]:
        model = chat_model()
        one = (await model.ainvoke(QUESTIONS[0])).content
        parts = [chunk.content async for chunk in model.astream(QUESTIONS[1])]
        batch = [found.content for found in await model.abatch(QUESTIONS)]
        return [one, "".join(parts), *batch]

    assert asyncio.run(run()) == [*wanted[:2], *wanted]


@pytest.mark.parametrize("streaming", [False, True])
def test_logprobs(streaming: bool) -> None:
    wanted = chat(max_tokens=16, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    model = chat_model(streaming=streaming, logprobs=True, top_logprobs=2)
    found = model.invoke(QUESTIONS[0]).response_metadata["logprobs"]["content"]
    assert [token["token"] for token in found] == [token["token"] for token in wanted["content"]]
    assert {len(token["top_logprobs"]) for token in found} == {2}
    assert [token["bytes"] for token in found] == [token["bytes"] for token in wanted["content"]]


def test_stop() -> None:
    model = chat_model(max_tokens=48)
    for found in (
        model.invoke(QUESTIONS[0], stop=["concept in"]),
        chat_model(max_tokens=48, stop=["concept in"]).invoke(QUESTIONS[0]),
    ):
        assert found.content == "Gravity is a fundamental "
        assert found.response_metadata["finish_reason"] == "stop"


def test_seed_and_several_choices() -> None:
    model = chat_model(temperature=1.0, seed=7, n=3)
    messages = [[HumanMessage(QUESTIONS[0])]]
    first, again = (
        [choice.text for choice in model.generate(messages).generations[0]] for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 3
    body = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 16}
    assert first == [choice["message"]["content"] for choice in chat(**body)["choices"]]


def test_fields_of_openai_and_of_vllm() -> None:
    """All that the model takes, and by `extra_body` what other servers do."""
    (wanted,) = answers(QUESTIONS[:1])
    same = chat_model(
        top_p=1,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={"5": 0},
        service_tier="auto",
        store=False,
        model_kwargs={"user": "ann"},
        extra_body={"top_k": 1, "min_p": 0, "repetition_penalty": 1},
    )
    assert same.invoke(QUESTIONS[0]).content == wanted
    long = chat_model(max_tokens=200, extra_body={"ignore_eos": True, "min_tokens": 200})
    usage = long.invoke(QUESTIONS[0]).usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == 200


def test_a_chain_and_several_turns() -> None:
    template = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])
    chain = template | chat_model() | StrOutputParser()
    said = chain.invoke({"question": QUESTIONS[0]})
    assert "".join(chain.stream({"question": QUESTIONS[0]})) == said
    turns = [SystemMessage("Be brief."), HumanMessage(QUESTIONS[0]), AIMessage(said)]
    found = chat_model().invoke(
        [*turns, HumanMessage([{"type": "text", "text": QUESTIONS[1]}], name="Ann")]
    )
    parts = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    assert found.content == chat(messages=parts, max_tokens=16)["choices"][0]["message"]["content"]


def test_token_counts_by_the_server() -> None:
    """langchain counts with OpenAI's vocabularies unless it is given another way."""

    def token_ids(text: str) -> list[int]:
        tokens: list[int] = ask("/tokenize", {"prompt": text})["tokens"]
        return tokens

    model = chat_model(custom_get_token_ids=token_ids)
    assert model.get_num_tokens(PROMPT) == completion(max_tokens=1)["usage"]["prompt_tokens"]


TOO_LONG = "word " * 9000
FAILURES: list[tuple[str, dict[str, Any], list[type[Exception]], str]] = [
    (
        *("temperature", {"temperature": -1}),
        *([openai.BadRequestError, langchain_core.exceptions.ModelInvalidRequestError], "-1|>="),
    ),
    (
        *("key", {"api_key": "wrong"}),
        *([openai.AuthenticationError, langchain_core.exceptions.ModelAuthenticationError], "key"),
    ),
    (
        *("model", {"model": "gpt-x"}),
        *([openai.NotFoundError, langchain_core.exceptions.ModelNotFoundError], "gpt-x"),
    ),
    (
        *("length", {"max_tokens": 10**6}),
        [openai.BadRequestError, langchain_core.exceptions.ModelInvalidRequestError],
        "maximum context length",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "fields", "kinds", "message"), FAILURES)
def test_errors_are_typed(
    name: str, fields: dict[str, Any], kinds: list[type[Exception]], message: str, stream: bool
) -> None:
    model = chat_model(**fields)
    with pytest.raises(kinds[0], match=message) as raised:
        list(model.stream(QUESTIONS[0])) if stream else model.invoke(QUESTIONS[0])
    assert isinstance(raised.value, tuple(kinds[1:]))


def test_too_long_a_prompt() -> None:
    with pytest.raises(langchain_core.exceptions.ContextOverflowError, match="maximum context"):
        chat_model().invoke(TOO_LONG)


def test_what_is_not_served_is_said() -> None:
    def weather(city: str) -> str:
        """Of a city."""
        return city

    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        chat_model().bind_tools([weather]).invoke(QUESTIONS[0])
    embeddings = OpenAIEmbeddings(**SERVER, check_embedding_ctx_length=False)
    with pytest.raises(openai.NotFoundError, match="there is no route /v1/embeddings"):
        embeddings.embed_query("Hello")


# --- completions ---------------------------------------------------------------------------------

PROMPTS = [PROMPT, "Once upon a time", "To be or not"]


def test_text() -> None:
    wanted = texts(PROMPTS)
    model = text_model()
    assert model.invoke(PROMPT) == wanted[0]
    assert "".join(model.stream(PROMPT)) == wanted[0]
    assert model.batch(PROMPTS) == wanted
    assert "".join(text_model(streaming=True).invoke(PROMPT)) == wanted[0]

    async def run() -> list[str]:
        return [await model.ainvoke(PROMPT), *await model.abatch(PROMPTS)]

    assert asyncio.run(run()) == [wanted[0], *wanted]


def test_many_prompts_in_one_request() -> None:
    wanted = texts(PROMPTS)
    found = text_model(batch_size=20).generate(PROMPTS)
    assert [choices[0].text for choices in found.generations] == wanted
    assert found.llm_output is not None
    assert found.llm_output["token_usage"]["completion_tokens"] == 48
    several = text_model(n=2, best_of=1, temperature=1.0, seed=7).generate(PROMPTS)
    assert [len(set(map(str, choices))) for choices in several.generations] == [2, 2, 2]


def test_logprobs_and_stop_of_text() -> None:
    found = text_model(logprobs=2).generate([PROMPT]).generations[0][0]
    assert found.generation_info is not None
    assert "".join(found.generation_info["logprobs"]["tokens"]) == found.text
    assert found.generation_info["finish_reason"] == "length"
    assert "Paris" in found.text
    assert "Paris" not in text_model().invoke(PROMPT, stop=["Paris"])
    with pytest.raises(openai.BadRequestError, match="best_of other than n is not supported"):
        text_model(best_of=2).invoke(PROMPT)
