"""What the text of a long answer costs, in work counted: linear in its length."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from support.fake_leaders import front_end_with_leaders
from support.http_server import COMPLETIONS, serving
from support.mailbox import settle
from support.tiny_model import TOKENIZER, ids

from aioengine import limits
from aioengine.api.outputs import collect
from aioengine.frontend import choices
from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.records import ChoiceSpec
from aioengine.frontend.sampling import SamplingFields
from aioengine.messages import ChoiceParams

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
