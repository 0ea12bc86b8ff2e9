"""What a client asks for, resolved against the model -> what is sent to a replica."""

import random
from collections.abc import Sequence

import msgspec

from aioengine import limits
from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.records import ChoiceSpec
from aioengine.frontend.sampling import InvalidFieldError, SamplingFields
from aioengine.frontend.text import ServedModel
from aioengine.messages import ChoiceParams
from aioengine.model_config import DefaultSampling

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them would overflow."""


def check_text(model: ServedModel, text: str, field: str, max_model_len: int) -> None:
    """Tokenizing takes time: a text that is too long at the most bytes a token has is refused."""
    max_bytes = max_model_len * model.tokenizer.max_token_bytes
    if len(text) > max_bytes:
        found = f"the prompt is too long: {field} has {len(text)} characters"
        raise _exceeds_context(found, field, max_model_len)


def check_prompt(
    model: ServedModel,
    prompt_ids: Sequence[int],
    prompt_field: str,
    max_model_len: int,
    max_tokens: int | None,
) -> int:
    """Tokens of the context that a prompt leaves; with `max_tokens` 0 it may leave none. Raises
    InvalidFieldError."""
    if not prompt_ids:
        raise InvalidFieldError(f"{prompt_field} must not be empty", prompt_field)
    if len(prompt_ids) > max_model_len - (max_tokens != 0):
        found = f"the prompt is too long: {prompt_field} has {len(prompt_ids)} tokens"
        raise _exceeds_context(found, prompt_field, max_model_len)
    if max(prompt_ids) >= model.config.vocab_size:
        raise InvalidFieldError(
            f"{prompt_field} has token id {max(prompt_ids)}, the vocabulary has "
            f"{model.config.vocab_size}",
            prompt_field,
        )
    return max_model_len - len(prompt_ids)


def _exceeds_context(found: str, field: str, max_model_len: int) -> InvalidFieldError:
    """Clients that see no codes know this error, and a prompt that is too long, by these words."""
    return InvalidFieldError(
        f"{found}, this model's maximum context length is {max_model_len} tokens",
        field,
        "context_length_exceeded",
    )


def resolve_choices(
    model: ServedModel,
    fields: SamplingFields,
    prompts: Sequence[Sequence[int]],
    *,
    max_model_len: int,
    seeds: random.Random,
    prompt_field: str,
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    default_max_tokens: int | None = None,
    logprobs: int | None,
    echoes: Sequence[str] | None = None,
) -> list[ChoiceSpec]:
    """n choices per prompt, prompt by prompt.

    `max_tokens` is what the client asked for; else the least of `default_max_tokens`, what the
    model's author chose, and what the context leaves. `seeds` gives one to a request that brings
    none. `echoes`: each prompt's text, where answers are to begin with it; `logprobs` then count
    for prompts, too. Raises InvalidFieldError that names the field in which the prompt, or the
    number, came.
    """
    fields = _with_defaults(fields, model.config.default_sampling)
    if echoes is not None and logprobs is not None:
        most = max(logprobs, fields.prompt_logprobs or 0)
        fields = msgspec.structs.replace(fields, prompt_logprobs=most)
    n = fields.n or 1
    _check_fan_out(prompts, n, fields.prompt_logprobs, prompt_field)
    seed = seeds.getrandbits(63) if fields.seed is None else fields.seed & limits.MAX_SEED
    defaults = default_max_tokens, model.config.default_max_tokens
    usual_length = min((number for number in defaults if number), default=max_model_len)
    stop_token_ids = _stop_token_ids(model, fields)
    logit_bias = fields.biased_logits(model.config.vocab_size)
    specs = []
    for index, prompt_ids in enumerate(prompts):
        room = check_prompt(model, prompt_ids, prompt_field, max_model_len, max_tokens)
        shared_ids = tuple(prompt_ids)
        if max_tokens is not None and max_tokens > room:
            found = f"{max_tokens_field} is {max_tokens} after a prompt of {len(prompt_ids)} tokens"
            raise _exceeds_context(found, max_tokens_field, max_model_len)
        first = _choice_params(
            fields,
            max_tokens=min(room, usual_length) if max_tokens is None else max_tokens,
            seed=seed,
            stop_token_ids=stop_token_ids,
            logprobs=logprobs,
            logit_bias=logit_bias,
        )
        for choice_index in range(n):
            params = first
            if choice_index:
                params = _of_choice(first, choice_index, describes_prompt=echoes is not None)
            echo = "" if echoes is None else echoes[index]
            specs.append(_choice_spec(model, fields, shared_ids, params, max_tokens, echo))
    return specs


def _check_fan_out(
    prompts: Sequence[Sequence[int]], n: int, prompt_logprobs: int | None, prompt_field: str
) -> None:
    """A small body must not become a large amount of work and memory."""
    if n * len(prompts) > limits.MAX_CHOICES_PER_REQUEST:
        raise InvalidFieldError(
            f"n × prompts is {n * len(prompts)}, the limit is {limits.MAX_CHOICES_PER_REQUEST}", "n"
        )
    num_tokens = n * sum(map(len, prompts))
    if num_tokens > limits.MAX_PROMPT_TOKENS_PER_REQUEST:
        raise InvalidFieldError(
            f"n × the tokens of {prompt_field} is {num_tokens}, the limit is "
            f"{limits.MAX_PROMPT_TOKENS_PER_REQUEST}",
            prompt_field,
        )
    num_entries = 0 if prompt_logprobs is None else num_tokens * (1 + prompt_logprobs)
    if num_entries > limits.MAX_PROMPT_LOGPROBS_PER_REQUEST:
        raise InvalidFieldError(
            f"{prompt_field} would be described by {num_entries} log probabilities, the limit is "
            f"{limits.MAX_PROMPT_LOGPROBS_PER_REQUEST}",
            prompt_field,
        )


def _choice_spec(
    model: ServedModel,
    fields: SamplingFields,
    prompt_ids: tuple[int, ...],
    params: ChoiceParams,
    asked_tokens: int | None,
    echo: str,
) -> ChoiceSpec:
    include_stop = bool(fields.include_stop_str_in_output)
    return ChoiceSpec(
        prompt_ids=prompt_ids,
        params=params,
        detokenizer=IncrementalDetokenizer(
            model.tokenizer,
            stop=fields.stop_strings(),
            include_stop=include_stop,
            skip_special_tokens=fields.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
        ),
        asked_tokens=asked_tokens,
        eos_token_ids=() if fields.ignore_eos else model.eos_token_ids,
        include_stop=include_stop,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        echo=echo,
    )


def _with_defaults(fields: SamplingFields, defaults: DefaultSampling) -> SamplingFields:
    """The fields, with the model's own choice for each sampling field that it leaves out."""
    chosen = {
        name: value
        for name, value in msgspec.structs.asdict(defaults).items()
        if value is not None and getattr(fields, name) is None
    }
    return msgspec.structs.replace(fields, **chosen)


def _of_choice(first: ChoiceParams, choice_index: int, *, describes_prompt: bool) -> ChoiceParams:
    """For another choice of the same prompt. It shares the prompt's log probabilities, unless it
    has to begin with them: then it waits for nobody else's."""
    prompt_logprobs = first.prompt_logprobs if describes_prompt else None
    return msgspec.structs.replace(
        first, choice_index=choice_index, prompt_logprobs=prompt_logprobs
    )


def _choice_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    seed: int,
    stop_token_ids: tuple[int, ...],
    logprobs: int | None,
    logit_bias: tuple[tuple[int, float], ...],
) -> ChoiceParams:
    """Of the first choice of a prompt."""
    temperature = 1.0 if fields.temperature is None else fields.temperature
    repetition_penalty = 1.0 if fields.repetition_penalty is None else fields.repetition_penalty
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidFieldError(
            f"min_tokens is {min_tokens}, but at most {max_tokens} tokens will be generated",
            "min_tokens",
        )
    return ChoiceParams(
        max_tokens=max(max_tokens, 1),  # a prompt ends in a draw; `Choice` leaves out one too many
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=max(fields.top_k or 0, 0),
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        seed=seed,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
    )


def _stop_token_ids(model: ServedModel, fields: SamplingFields) -> tuple[int, ...]:
    """The client's, and the model's end-of-sequence tokens unless they are to be ignored."""
    stop_ids = list(fields.stop_token_ids or [])
    if any(token_id >= model.config.vocab_size for token_id in stop_ids):
        raise InvalidFieldError(
            f"stop_token_ids has {max(stop_ids)}, the vocabulary has {model.config.vocab_size}",
            "stop_token_ids",
        )
    if not fields.ignore_eos:
        stop_ids += model.eos_token_ids
    return tuple(dict.fromkeys(stop_ids))
