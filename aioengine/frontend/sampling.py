"""What clients may ask for, with its bounds; `choices.py` resolves it against the model."""

import math
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from aioengine import limits

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumLogprobs = Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_STRING_CHARS)]
StopStrings = Annotated[list[StopString], Meta(max_length=limits.MAX_STOP_STRINGS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(
        max_length=limits.MAX_LOGIT_BIAS,
        description="By token id, as text.",
        extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    ),
]


class InvalidFieldError(ValueError):
    """A field of a request is at fault: `field` names it, `code` says how, where clients of
    OpenAI's API know a word for it."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every way to ask for tokens shares. None: not given, so the model's own default."""

    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=limits.MAX_SEED)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None
    prompt_logprobs: NumLogprobs | None = None

    def biased_logits(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        """`logit_bias` by token id."""
        biases = []
        for name, bias in (self.logit_bias or {}).items():
            is_number = name.isascii() and name.isdecimal() and len(name) <= 10
            if not is_number or int(name) >= vocab_size:
                raise InvalidFieldError(
                    f"logit_bias: {name[:32]!r} is not a token id; those of this model are 0 to "
                    f"{vocab_size - 1}",
                    "logit_bias",
                )
            biases.append((int(name), bias))
        return tuple(biases)

    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class SamplingParams(SamplingFields, kw_only=True):
    """What `AsyncEngine.generate` takes. `max_tokens`, when not given, is what the context leaves,
    or less where the model's generation_config.json says so.

    `logprobs` is the number of top alternatives to report beside each chosen token.
    """

    logprobs: NumLogprobs | None = None

    def checked(self) -> Self:
        """A copy whose types and bounds hold: msgspec does not check what is constructed.

        Raises InvalidFieldError.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidFieldError(f"SamplingParams: {name} is {value}", name)
        try:
            return msgspec.json.decode(msgspec.json.encode(self), type=type(self))
        except (msgspec.MsgspecError, TypeError) as error:
            raise InvalidFieldError(f"SamplingParams: {error}") from None
