"""collective_rpc: how a method is named on other ranks, and what a call may carry.

A method travels as text: a registered name, or `module:qualname` of a function that every rank can
import. Arguments and values travel as msgpack: plain data, never code, never tensors.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from aioengine.limits import MAX_METHOD_CHARS, MAX_RPC_BYTES
from aioengine.messages import RemoteCall

METHODS: Final[dict[str, Callable[..., Any]]] = {}
"""What may be called by a bare name. Each takes the worker first."""
ADVICE: Final = (
    "plain data (None, bool, numbers, str, bytes, lists, dicts) travels by msgpack; tensors travel "
    "by process group: let the method itself broadcast or load them"
)


class UnknownMethodError(ValueError):
    """No such registered name, or no such function in the module."""


def rpc_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function under its own name, which HTTP may use, too."""
    assert function.__name__ not in METHODS, f"method {function.__name__} is registered twice"
    METHODS[function.__name__] = function
    return function


def method_name(method: str | Callable[..., Any]) -> str:
    """What stands for `method` on the wire.

    Raises TypeError, with advice, for what other ranks could not find (lambdas, closures, bound
    methods, functions inside functions) and what they could not finish (async functions);
    ValueError for text that names nothing.
    """
    if isinstance(method, str):
        if len(method) > MAX_METHOD_CHARS or not method.isprintable():
            raise ValueError(
                f"collective_rpc: a method has a name of up to {MAX_METHOD_CHARS} printable "
                f"characters, got {len(method)}, which begin with {method[:32]!r}"
            )
        return method
    what = getattr(method, "__qualname__", type(method).__name__)
    if not inspect.isfunction(method):
        kind = "a bound method" if inspect.ismethod(method) else f"a {type(method).__name__}"
        raise TypeError(f"collective_rpc: {what} is {kind}; pass a function of a module instead")
    if method.__name__ == "<lambda>" or "<locals>" in what:
        raise TypeError(
            f"collective_rpc: {what} exists in this process only (a lambda, or a function inside a "
            "function); define it at the top of a module that every rank imports, and pass what "
            "it needs as arguments"
        )
    name = f"{method.__module__}:{what}"
    if find_method(name, registered_only=False) is not method:
        raise TypeError(
            f"collective_rpc: {what} is not what {name} stands for, which other ranks would call; "
            "pass the function that its module has under that name"
        )
    if inspect.iscoroutinefunction(method):
        raise TypeError(
            f"collective_rpc: {what} is async; methods run on the device thread, which has no loop"
        )
    return name


def find_method(name: str, *, registered_only: bool) -> Callable[..., Any]:
    """The function behind a name on this rank. Raises UnknownMethodError."""
    module_name, colon, qualname = name.partition(":")
    if not colon:
        if name not in METHODS:
            known = ", ".join(sorted(METHODS))
            raise UnknownMethodError(f"no method {name!r} is registered; there are {known}")
        return METHODS[name]
    if registered_only:
        raise UnknownMethodError(f"{name!r}: only registered methods may be called here")
    try:
        found: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name
        raise UnknownMethodError(f"this rank cannot find {name!r}: {error}") from None
    if not inspect.isfunction(found):
        raise UnknownMethodError(f"{name!r} is no function but a {type(found).__name__}")
    return found


def encode_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """TypeError names the argument that cannot travel, or says that all are too large."""
    named = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
    for name, value in named.items():
        encode_value(value, name)
    return encode_value((args, kwargs), "the arguments")


def decode_arguments(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    return msgspec.msgpack.decode(data, type=tuple[list[Any], dict[str, Any]])


def encode_value(value: Any, what: str) -> bytes:
    """TypeError says `what` it was and why it cannot travel."""
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"collective_rpc: {what}: {error}; {ADVICE}") from None
    if len(data) > MAX_RPC_BYTES:
        raise TypeError(
            f"collective_rpc: {what}: {len(data)} bytes, the limit is {MAX_RPC_BYTES}; {ADVICE}"
        )
    return data


def decode_value(data: bytes) -> Any:
    """ValueError for what was encoded and yet cannot be read: it nests deeper than the stack here
    allows, or was no msgpack (`msgspec.Raw` travels unseen)."""
    try:
        return msgspec.msgpack.decode(data)
    except (RecursionError, msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"the value cannot be read: {error}; {ADVICE}") from None


def run_method(call: RemoteCall, worker: Any, rank_in_replica: int) -> bytes:
    """Run the method on this rank; msgpack of its value, nothing when that is not wanted.

    Raises what the method raises, UnknownMethodError, and TypeError for a value that cannot travel.
    """
    method = find_method(call.method, registered_only=call.registered_only)
    args, kwargs = decode_arguments(call.arguments)
    value = method(worker, *args, **kwargs)
    if not call.wants_value_of(rank_in_replica):
        return b""
    return encode_value(value, f"the value of {call.method}")
