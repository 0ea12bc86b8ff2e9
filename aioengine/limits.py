"""Every limit on what a client or a connection may send, in one table."""

from typing import Final

MAX_BODY_BYTES: Final = 8 * 2**20
MAX_BODIES_BYTES: Final = 2**29
"""Of all requests in hand."""
MAX_BODY_SECONDS: Final = 120.0
"""Until a body has come."""
MAX_TARGET_BYTES: Final = 8 * 2**10
"""Of a request line."""
MAX_HEADER_BYTES: Final = 16 * 2**10
"""Of one header."""
MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 64 * 2**10
"""Of a request line with its headers."""
MAX_CONNECTIONS: Final = 16_384
MAX_STALL_SECONDS: Final = 120
"""For a client that reads nothing of what was sent to it."""
MAX_UNSENT_BYTES: Final = 128 * 2**10
"""In the kernel, of one connection: more waits here, where events merge."""
MAX_BODY_MARKS: Final = 2**18
"""`[`, `{` and `:` in a body, in its texts or between them. Each may become an object of its own:
8 MB of nothing else would hold up the event loop for seconds."""
MAX_BODY_FIELDS: Final = 256
MAX_SEARCHED_BYTES: Final = 2**20
"""Of a body that is not JSON, for the field at fault, or that has whole numbers written as 1.0: the
event loop waits, 0.4 s for 8 MB of numbers."""
MAX_LOGGED_FIELDS: Final = 100
"""Different names of unknown fields that one server logs."""
MAX_LOGGED_NAME_CHARS: Final = 64
"""Of each."""
MAX_PROMPTS_PER_REQUEST: Final = 1024
MAX_CHOICES: Final = 128
"""`n`."""
MAX_CHOICES_PER_REQUEST: Final = 1024
"""n × prompts of one body."""
MAX_PROMPT_TOKENS_PER_REQUEST: Final = 2**22
"""n × the tokens of all prompts of one body: every choice has a copy."""
MAX_PROMPT_LOGPROBS_PER_REQUEST: Final = 2**22
"""What describes prompts, in entries: each token, and the best ones beside it."""
MAX_MESSAGES: Final = 4096
MAX_ROLE_CHARS: Final = 64
MAX_CACHE_SALT_CHARS: Final = 256
MAX_COMPARED_PROMPT_TOKENS: Final = 2**15
"""The beginning of a prompt that routing looks at: half a millisecond of the event loop."""
MAX_REMEMBERED_PREFIXES: Final = 2**16
"""Of prompts sent to replicas, in one front end: some 15 MB."""
MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
"""Entries of one request."""
MAX_SEED: Final = 2**63 - 1

MAX_TEMPLATE_OUTPUT_CHARS: Final = 2 * MAX_BODY_BYTES
"""A conversation that fills a request body, and as much again around it."""
MAX_TEMPLATE_MADE_CHARS: Final = 2**28
"""Of everything that one rendering makes on its way."""
MAX_TEMPLATE_STEPS: Final = 200_000
"""Loop passes and calls of one rendering."""
MAX_TEMPLATE_CPU_S: Final = 5.0
MAX_TEMPLATE_ARGUMENTS: Final = 32
"""Of one call in a template."""
MAX_TEMPLATE_EXPONENT: Final = 64
MAX_TEMPLATE_INT_BITS: Final = 2**12

MAX_METHOD_CHARS: Final = 256
"""Of the name of a `collective_rpc` method."""
MAX_RPC_BYTES: Final = 4 * 2**20
"""Of the arguments of one `collective_rpc`, of one value, and of all values that HTTP asks for."""
MAX_ERROR_CHARS: Final = 2048
"""Of an exception's message, on its way to another rank."""
MAX_TRACEBACK_CHARS: Final = 8192

MAX_HANDSHAKE_FRAME_BYTES: Final = 64 * 2**10
"""Before a connection has proved itself; configurations are compared in this phase."""
HANDSHAKE_TIMEOUT_S: Final = 20.0
MAX_TRACE_QUESTION_BYTES: Final = 2**10
MAX_TRACE_ANSWER_BYTES: Final = 16 * 2**20
"""The stacks of one rank, twice, or its spans."""
MAX_RECORDED_STEPS: Final = 1000
"""Of one recording of steps."""
MAX_RECORDED_SECONDS: Final = 60
BYTES_PER_TOKEN_ID: Final = 5
"""A msgpack integer of up to 32 bits."""


def max_frame_bytes(
    *, max_model_len: int, max_num_batched_tokens: int, num_slots: int, block_size: int
) -> int:
    """Largest control frame a correct launch can produce: a prompt, a plan, a step's results, or
    what `collective_rpc` carries.

    A plan may bring every slot's whole block table at once (prefix hits cost no token budget), and
    as much history as tokens. Results may describe every prompt token of a step.
    """
    params = MAX_STOP_TOKEN_IDS * BYTES_PER_TOKEN_ID + MAX_LOGIT_BIAS * 16 + 2048
    prompt = max_model_len * BYTES_PER_TOKEN_ID + params
    block_table = -(-max_model_len // block_size) * BYTES_PER_TOKEN_ID
    plan = 2 * max_num_batched_tokens * BYTES_PER_TOKEN_ID + num_slots * (block_table + params)
    results = (num_slots + max_num_batched_tokens) * (MAX_LOGPROBS + 2) * 16
    return 2**16 + max(prompt, plan, results, MAX_RPC_BYTES)
