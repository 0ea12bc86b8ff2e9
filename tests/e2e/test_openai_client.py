"""The released `openai` client against tp2·pp2 with the default model."""

from collections.abc import Iterator

import openai
import pytest
from support.launching import Launch

FLAGS = ("-tp", "2", "-pp", "2", "--api-key", "sesame", "--admin-api-key", "open")
QUESTION = [{"role": "user", "content": "What is gravity?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        Launch(*FLAGS, num_ranks=4) as launch,
        openai.OpenAI(base_url=launch.wait_ready() + "/v1", api_key="sesame") as client,
    ):
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=12, temperature=0
    )
    assert answer.choices[0].message.content
    assert "ravity" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == 34


def test_completions(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=5, temperature=0
    )
    assert "Paris" in answer.choices[0].text


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored(client: openai.OpenAI, model: str, max_tokens: int) -> None:
    prompt = "The capital of France is"
    (choice,) = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
    ).choices
    assert choice.text == prompt + " Paris"[: 6 * max_tokens]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.text_offset is not None
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in found.token_logprobs[1:] if logprob is not None)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert choice.text.startswith(token, offset)


def test_stream_equals_whole(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=24, temperature=0
    )
    text, usage, finish = "", None, None
    for chunk in client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob  # greedy takes the best
        assert bytes(token.bytes or []).decode() == token.token
    text = "".join(token.token for token in logprobs.content)
    assert text == answer.choices[0].message.content


def test_three_choices_and_seed(client: openai.OpenAI, model: str) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=12, n=3, seed=7, temperature=1.0
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_stop(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=48, temperature=0, stop=["concept in"]
    )
    assert answer.choices[0].message.content == "Gravity is a fundamental "
    assert answer.choices[0].finish_reason == "stop"


def test_errors_are_typed(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-x", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=model, messages=QUESTION, web_search_options={})
    assert unsupported.value.code == "unsupported"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_the_admin_routes(client: openai.OpenAI, model: str) -> None:
    """`collective_rpc` on real ranks; a cleared prefix cache makes no difference but time."""
    admin = client.with_options(api_key="open", base_url=str(client.base_url).replace("/v1", ""))
    ranks = admin.post("/collective_rpc", body={"method": "rank_info"}, cast_to=dict)["results"]
    assert [rank["coords"] for rank in ranks] == [
        f"dp0 pp{pp} tp{tp}" for pp in range(2) for tp in range(2)
    ]
    assert len({rank["pid"] for rank in ranks}) == 4
    body = {"method": "rank_info", "unique_reply_rank": 2, "timeout": 10}
    (one,) = admin.post("/collective_rpc", body=body, cast_to=dict)["results"]
    assert one == ranks[2]
    with pytest.raises(openai.NotFoundError, match="no method 'nothing' is registered"):
        admin.post("/collective_rpc", body={"method": "nothing"}, cast_to=dict)
    with pytest.raises(openai.AuthenticationError):
        client.post(str(admin.base_url) + "reset_prefix_cache", body={}, cast_to=dict)
    assert admin.post("/reset_prefix_cache", cast_to=dict) == {"status": "ok"}
    test_completions(client, model)
