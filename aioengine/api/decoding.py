"""From the bytes of a request to a body of `schema.py`, or to a 400 that names the field at fault.

A whole number may be written as 1.0, as JSON's schemas have it: a body is decoded again for that
only when it has been refused.

`param` is the name of a field of the body; where in that field the fault lies stands in the
message. No field is named where none can be: not JSON, not an object, nested too deeply, and (in
`app.py`) larger than the limit.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from aioengine import limits
from aioengine.api.errors import ApiError, invalid, unsupported
from aioengine.api.schema import UNSUPPORTED, UNSUPPORTED_PARTS, SamplingBody

Body = TypeVar("Body", bound=msgspec.Struct)
AnySamplingBody = TypeVar("AnySamplingBody", bound=SamplingBody)

MAX_NAME_CHARS: Final = 64
"""Of a field's name in an answer."""


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """Raises ApiError 400 that says what was found."""
    num_marks = sum(map(data.count, (b"[", b"{", b":")))
    if num_marks > limits.MAX_BODY_MARKS:
        raise invalid(
            f"the body has {num_marks} brackets and colons, the limit is {limits.MAX_BODY_MARKS}"
        )
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error) or len(data) > limits.MAX_SEARCHED_BYTES:
                raise
            return msgspec.json.decode(_with_whole_numbers(data, kind), type=kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(error) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(data, error) from None


def decode_sampling_body(
    data: bytes, kind: type[AnySamplingBody]
) -> tuple[AnySamplingBody, list[str]]:
    """A body, and the names of the fields in it that this server does not know.

    Raises ApiError 400, also for what is known but not supported.
    """
    body = decode_body(data, kind)
    unknown = []
    for key, value in _fields(data).items():
        name = str(key)
        if name in kind.__struct_fields__:
            continue
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif not _asks_for_nothing(name, value):
            raise unsupported(name)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    return body, unknown


class _Name(str):
    """Of a field. A type of our own, so that msgspec hands over each of them."""


def _fields(data: bytes) -> dict[_Name, msgspec.Raw]:
    """Of a body that can be decoded; its unknown values may be odd. Names are counted as they are
    read: a body of nothing else is given up early."""
    num_names = 0

    def take(kind: type, text: str) -> _Name:
        nonlocal num_names
        num_names += 1
        if num_names > limits.MAX_BODY_FIELDS:
            raise ValueError
        return _Name(text)

    try:
        return msgspec.json.decode(data, type=dict[_Name, msgspec.Raw], dec_hook=take)
    except msgspec.ValidationError:
        raise invalid(f"the body has more than {limits.MAX_BODY_FIELDS} fields") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(data, error) from None


def _with_whole_numbers(data: bytes, kind: type[msgspec.Struct]) -> bytes:
    """The body with 1 for 1.0 in the fields of whole numbers, and in lists of such."""
    fields = _fields(data)
    for name in _whole_number_fields(kind) & fields.keys():
        value = msgspec.json.decode(fields[_Name(name)])
        if (found := _as_whole(value)) is not value:
            fields[_Name(name)] = msgspec.Raw(msgspec.json.encode(found))
    return msgspec.json.encode(fields)


def _as_whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_whole(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= limits.MAX_SEED:
        return int(value)
    return value


@functools.cache
def _whole_number_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return frozenset(field.name for field in info.fields if _holds_whole_numbers(field.type))


def _holds_whole_numbers(found: msgspec.inspect.Type) -> bool:
    """Itself, in a list, or as one of several types."""
    match found:
        case msgspec.inspect.IntType():
            return True
        case msgspec.inspect.Metadata(type=inner) | msgspec.inspect.ListType(item_type=inner):
            return _holds_whole_numbers(inner)
        case msgspec.inspect.UnionType(types=types):
            return any(map(_holds_whole_numbers, types))
        case _:
            return False


def _asks_for_nothing(name: str, value: msgspec.Raw) -> bool:
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return any(
        decoded == neutral and isinstance(decoded, bool) == isinstance(neutral, bool)
        for neutral in UNSUPPORTED[name]
    )


def _invalid_field(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    match = re.search(r" - at (?:`key` in )?`\$(?:\.?(?P<path>[^`]*))`$", text)
    path = match["path"] if match else ""
    message = text[: match.start()] if match else text
    part = re.fullmatch(r"Invalid enum value '(\w+)'", message)
    if part and part[1] in UNSUPPORTED_PARTS and path.endswith(".type"):
        return invalid(f"{path}: {part[1]} is not supported yet", "messages", "unsupported")
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        path = f"{path}.{missing[1]}".lstrip(".")
    path = path.replace("[...]", "")
    field = re.match(r"\w+", path)
    message = f"{path or 'the body'}: {message}"
    return invalid(message, None if field is None else field[0])


def _not_json(data: bytes, error: Exception) -> ApiError:
    """Python's reader takes what clients write although JSON has no word for it: NaN, infinities,
    lone surrogates, bytes that are not UTF-8. Then the field that holds it is at fault."""
    fields = None
    if len(data) <= limits.MAX_SEARCHED_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(data.decode(errors="surrogateescape"), parse_constant=_Constant)
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if len(name) > MAX_NAME_CHARS or not _is_text(name):
            continue
        for scalar in _scalars(value):
            if isinstance(scalar, _Constant):
                return invalid(f"{name}: JSON has no number {scalar.spelling}", name)
            if isinstance(scalar, str) and not _is_text(scalar):
                return invalid(f"{name}: not Unicode text (lone surrogates, broken UTF-8)", name)
    return invalid(f"the body is not valid JSON: {error}")


class _Constant:
    """NaN, Infinity or -Infinity."""

    def __init__(self, spelling: str) -> None:
        self.spelling = spelling


def _is_text(text: str) -> bool:
    return not re.search(r"[\ud800-\udfff]", text)


def _scalars(value: Any) -> Iterator[Any]:
    """What lists and objects, keys included, hold at any depth."""
    stack = [value]
    while stack:
        match stack.pop():
            case list() as entries:
                stack += entries
            case dict() as entries:
                stack += [*entries.keys(), *entries.values()]
            case scalar:
                yield scalar
