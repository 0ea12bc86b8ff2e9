"""What the text of a long answer costs, in work counted: linear in its length."""

import asyncio
import importlib
import threading
from collections import Counter
from typing import Any

import msgspec
import pytest
from support.fake_leaders import front_end_with_leaders
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, serving
from support.mailbox import settle
from support.tiny_model import TOKENIZER, ids

from aioengine import limits
from aioengine.api.answers import ChatChoice, CompletionChoice
from aioengine.api.outputs import collect
from aioengine.frontend import choices
from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.records import ChoiceSpec
from aioengine.frontend.sampling import SamplingFields
from aioengine.frontend.tokenizer import Tokenizer
from aioengine.messages import ChoiceParams, RequestDelta, TokenLogprobs

NUM_TOKENS = 3000


class Counted(str):
    """Counts characters that `+` copies and that are looked at by index."""

    num_copied = 0
    num_looked_at = 0

    def __add__(self, other: str) -> "Counted":
        Counted.num_copied += len(self) + len(other)
        return Counted(str(self) + str(other))

    def __radd__(self, other: str) -> "Counted":
        return Counted(other) + self

    def __getitem__(self, key: object) -> str:
        Counted.num_looked_at += 1
        return super().__getitem__(key)  # type: ignore[index]


class CountedText(IncrementalDetokenizer):
    def push(self, token_ids: tuple[int, ...]) -> str:
        return Counted(super().push(token_ids))


async def test_the_pieces_of_an_answer_are_joined_once() -> None:
    """Whether the reader keeps up or comes late."""
    front_end, (leader,) = front_end_with_leaders(1)
    leader.ready()
    await settle()
    Counted.num_copied = 0
    for is_slow in (False, True):
        params = ChoiceParams(max_tokens=NUM_TOKENS)
        spec = ChoiceSpec(prompt_ids=(1,), params=params, detokenizer=CountedText(TOKENIZER))
        async with front_end.generate([spec]) as generation:
            added = (await leader.added(1 + is_slow))[-1]
            for step in range(100):
                leader.answer(added, ids("abc"), "length" if step == 99 else None)
            if is_slow:
                await settle()
            (whole,) = await collect(generation)
            assert whole.text == "abc" * 100
    assert Counted.num_copied <= 2 * 300


def test_a_token_is_compared_with_stop_strings_a_few_times() -> None:
    """Even where every character might begin, and none ends, a long stop string."""
    stop = tuple(Counted("a" * length + "b") for length in (1, 10, 400))
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop, min_tokens=NUM_TOKENS // 2)
    Counted.num_looked_at = 0
    num_shown = 0
    for _ in range(NUM_TOKENS):
        num_shown += len(detokenizer.push(ids("a")))
    assert num_shown == NUM_TOKENS - 400
    assert Counted.num_looked_at <= 4 * len(stop) * NUM_TOKENS


LOGPROBS = TokenLogprobs(-0.5, ((97, -1.0),), 1)


@pytest.mark.parametrize(
    ("path", "body", "maker"),
    [
        (CHAT, {**MESSAGES, "logprobs": True}, "chat.chat_logprobs"),
        (CHAT, {**MESSAGES, "prompt_logprobs": 1}, "chat.prompt_logprobs"),
        (COMPLETIONS, {**PROMPT, "logprobs": 1}, "completions.CompletionTokens"),
        (COMPLETIONS, {**PROMPT, "prompt_logprobs": 1}, "completions.prompt_logprobs"),
    ],
)
async def test_log_probabilities_are_described_off_the_loop_choice_by_choice(
    path: str, body: dict[str, Any], maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 µs a token: 128 choices of 4,000 tokens held up the loop for longer than a heartbeat, and
    all of them together would be a gigabyte of objects."""
    done: list[str] = []
    module = importlib.import_module(f"aioengine.api.{maker.partition('.')[0]}")
    make = getattr(module, maker.partition(".")[2])

    def made(*args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        done.append("made")
        return make(*args, **kwargs)

    def encoded(value: Any) -> bytes:
        if isinstance(value, (ChatChoice, CompletionChoice)):
            done.append("encoded")
        return encode(value)

    encode = msgspec.json.encode
    monkeypatch.setattr(module, maker.partition(".")[2], made)
    monkeypatch.setattr(msgspec.json, "encode", encoded)
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(server.post(path, {**body, "n": 2}))
        for added in await server.leader.added(2):
            if added.params.prompt_logprobs is not None:
                described = (LOGPROBS,) * (len(added.token_ids) - 1)
                server.leader.report(RequestDelta(added.request_id, (), prompt_logprobs=described))
        await server.play("ab", count=2)
        answer = await asked
    assert answer.status == 200, answer.text
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1]
    of_prompt = ["made", "encoded", "encoded"]
    assert done == (of_prompt if "prompt_logprobs" in body else ["made", "encoded"] * 2)


async def test_spellings_of_tokens_are_looked_up_off_the_loop_and_only_when_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    look_up = Tokenizer.token_text

    def noted(self: Tokenizer, token_id: int) -> str:
        threads.append(threading.current_thread())
        return look_up(self, token_id)

    monkeypatch.setattr(Tokenizer, "token_text", noted)
    async with serving() as server:
        answer = (await server.post("/tokenize", PROMPT)).json
        assert (answer["count"], answer["token_strs"], threads) == (5, None, [])
        answer = (await server.post("/tokenize", {**PROMPT, "return_token_strs": True})).json
        assert answer["token_strs"] == list("hello")
    assert len(threads) == 5
    assert threading.main_thread() not in threads


async def test_what_choices_share_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 8 prompts, n 128 and long lists took seconds of the event loop."""
    num_made = Counter[str]()
    for owner, name in ((SamplingFields, "biased_logits"), (choices, "_stop_token_ids")):
        real = getattr(owner, name)

        def counted(*args: Any, name: str = name, real: Any = real) -> Any:
            num_made[name] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, counted)
    stop = [Counted("a" * 1000 + str(i)) for i in range(limits.MAX_STOP_STRINGS)]
    monkeypatch.setattr(SamplingFields, "stop_strings", lambda _: tuple(stop))
    Counted.num_looked_at = 0
    async with serving(max_concurrent_requests=2000) as server, asyncio.TaskGroup() as tasks:
        body = {"prompt": ["a"] * 8, "n": 128, "logit_bias": {"1": 1}, "stop_token_ids": [1]}
        answer = tasks.create_task(server.post(COMPLETIONS, body))
        await server.play("x", count=1024)
        assert (await answer).status == 200
    assert set(num_made.values()) == {1}
    assert Counted.num_looked_at <= 6 * 1002 * len(stop)
