"""Every message survives the wire: encode, then decode through the union its receiver uses."""

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine import handshake_messages, messages
from aioengine.messages import NewSlot, Ordered, SlotParams, SlotStep, StepPlan

UNIONS = {
    "FrontEndCommand": messages.FrontEndCommand,
    "LeaderEvent": messages.LeaderEvent,
    "PeerCommand": messages.PeerCommand,
    "PeerEvent": messages.PeerEvent,
    "HandshakeMessage": handshake_messages.HandshakeMessage,
}
MEMBERS = [
    pytest.param(union, member, id=f"{name}-{member.__name__}")
    for name, union in UNIONS.items()
    for member in get_args(union)
]

wire_ints = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)
untyped = st.recursive(
    st.none() | st.booleans() | wire_ints | floats | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation that messages use; a new kind of field is an error here."""
    scalars = {
        int: wire_ints,
        float: floats,
        bool: st.booleans(),
        str: st.text(),
        bytes: st.binary(),
        type(None): st.none(),
        Any: untyped,
    }
    if kind in scalars:
        return scalars[kind]
    args = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(*(values(arg) for arg in args))
    if get_origin(kind) is Literal:
        return st.sampled_from(args)
    if get_origin(kind) is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if get_origin(kind) is tuple:
        if args[1:] == (...,):
            return st.lists(values(args[0]), max_size=3).map(tuple)
        return st.tuples(*(values(arg) for arg in args))
    assert issubclass(kind, msgspec.Struct), kind
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{field.name: values(field.type) for field in fields})


@pytest.mark.parametrize(("union", "member"), MEMBERS)
@settings(max_examples=20)
@given(data=st.data())
def test_each_message_round_trips(union: Any, member: type, data: st.DataObject) -> None:
    message = data.draw(values(member))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


@pytest.mark.parametrize(("union", "member"), MEMBERS)
@settings(max_examples=10)
@given(data=st.data(), noise=st.binary(max_size=8))
def test_a_damaged_frame_is_an_error_or_a_message(
    union: Any, member: type, data: st.DataObject, noise: bytes
) -> None:
    frame = msgspec.msgpack.encode(data.draw(values(member)))
    cut = data.draw(st.integers(0, len(frame)))
    try:
        message = msgspec.msgpack.decode(frame[:cut] + noise, type=union)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert isinstance(message, get_args(union))


def test_messages_are_frozen() -> None:
    named = [*vars(messages).values(), *vars(handshake_messages).values()]
    kinds = [kind for kind in named if isinstance(kind, type)]
    structs = [kind for kind in kinds if issubclass(kind, msgspec.Struct)]
    assert structs
    assert [struct for struct in structs if not struct.__struct_config__.frozen] == []


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)
def test_an_unknown_tag_is_refused(union: Any) -> None:
    for unknown in ({"type": "nonsense"}, ["nonsense"]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(unknown), type=union)


def test_fields_that_are_missing_at_the_end_take_their_defaults() -> None:
    old = ["result", 7, []]
    assert msgspec.convert(old, messages.PeerEvent) == messages.StepResult(7, ())


def test_a_decode_plan_stays_small() -> None:
    steps = tuple(SlotStep(i, 1, 500 + i, (40000 + i,), (), True) for i in range(32))
    plan = Ordered(10_000, StepPlan((), steps, share_sampled=True))
    assert len(msgspec.msgpack.encode(plan)) < 32 * 16


def test_an_empty_plan_and_the_tokens_of_a_plan() -> None:
    params = SlotParams(1.0, 0, 1.0, 0.0, 0, 0, None)
    assert StepPlan((NewSlot(0, 1, params),), ()).is_empty
    plan = StepPlan(
        (), (SlotStep(0, 1, 0, (5, 6), (1,), False), SlotStep(1, 1, 9, (-1,), (), True))
    )
    assert not plan.is_empty
    assert plan.num_tokens == 3
