"""Every message that crosses a process border: closed tagged unions, msgpack-encoded.

Hot messages are `array_like` (field order is the wire format; new fields go last, with defaults).
Ids: `slot` is a row of the workers' request table, `epoch` tells two tenants of a slot apart, `seq`
numbers plans and device calls of one replica without gaps.
"""

from typing import Any, Final, Literal

import msgspec

PREV: Final = -1
"""In `SlotStep.token_ids`: the id this request got from its latest sampled step."""

FinishReason = Literal["stop", "length", "abort", "error"]


class ChoiceParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one choice of one request asks for. The front end has resolved every default.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. `logprobs` is the number of top
    alternatives to report beside the chosen token; None reports nothing.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """End-of-sequence ids included, unless the client asked to ignore them."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """As `logprobs`, for every prompt token; such a request does not read the prefix cache."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""


# --- front end -> leader ---------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="add"):
    request_id: str
    token_ids: tuple[int, ...]
    params: ChoiceParams
    priority: int = 0
    """Lower runs earlier."""
    cache_salt: str = ""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The client left, or the front end found a stop string. No further delta follows."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Orderly end: front end to leader, leader to peers. The receiver ends with status 0."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """This side closes in order: the end of the connection is no failure."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """A rank lives, and what its device thread is in. Those of front ends say nothing more."""

    last_seq: int = 0
    """The last completed job."""
    doing: str = ""
    """The job."""
    operation: str = ""
    """What moves data or waits for it inside the job, if anything."""
    doing_s: float = 0.0
    """How long the job has taken so far, or the thread has been idle."""
    step: int = 0
    """The plan that is computed; 0 outside of steps."""
    num_unanswered: int = 0
    """Beats for which a device thread without work has not answered a probe."""

    @property
    def where(self) -> str:
        """Such as "step 812, all_reduce of tp:0 [ranks 2, 3]"."""
        return f"{self.doing}, {self.operation}" if self.operation else self.doing

    @property
    def last_words(self) -> str:
        """For the line about a rank that beats no more."""
        return f"; it was last in {self.where}, job {self.last_seq} done"


class RemoteCall(msgspec.Struct, frozen=True, array_like=True, tag="remote"):
    """`collective_rpc`: run a method on every rank of the replica. What it raises is the caller's
    business and leaves the replica alive."""

    method: str
    """A registered name, or module:qualname."""
    arguments: bytes
    """msgpack of (args, kwargs)."""
    reply_rank: int | None = None
    """Rank in the replica whose value is wanted; None: those of all."""
    registered_only: bool = False

    def wants_value_of(self, rank_in_replica: int) -> bool:
        return self.reply_rank is None or self.reply_rank == rank_in_replica


class ReplicaCall(msgspec.Struct, frozen=True, array_like=True, tag="replica_call"):
    """Front end to leader: a `collective_rpc` on its replica. Answered by one CallEnded."""

    call_id: int
    call: RemoteCall
    timeout_s: float | None


class ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, tag="reset_prefix_cache"):
    """No later request reuses what was computed before. Answered by one CallEnded."""

    call_id: int


FrontEndCommand = AddRequest | Abort | Heartbeat | Shutdown | ReplicaCall | ResetPrefixCache


# --- leader -> front end ---------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one output position; `top` is sorted, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """1 + how many tokens were more probable than this one; 0: not known."""


class RequestDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request. Exactly one delta of a request has a finish_reason."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next prompt tokens, in order, beginning with the second token of the prompt."""


class LoadStats(msgspec.Struct, frozen=True, array_like=True):
    """A replica's gauges, and counters since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    """Usable blocks: the null block is not counted."""
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up."""
    prefix_cache_hits: int = 0
    """Tokens found."""
    last_seq: int = 0
    num_cached_blocks: int = 0
    """Free blocks that still hold reusable content (a part of `num_free_blocks`)."""
    num_prefill_tokens: int = 0
    """Of all its requests: what has to be computed before they draw their next token."""
    prefix_cache_epoch: int = 0
    """Another number when nothing that was computed before is reused any more."""


class StepReport(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """One message per step and front end."""

    deltas: tuple[RequestDelta, ...]
    stats: LoadStats
    admitted: tuple[str, ...] = ()
    """Ids of its requests that have just got their first slot: they wait no more."""
    num_added: int = 0
    """Requests of this front end that the leader has taken so far: `stats` knows no later ones."""


class RankInfo(msgspec.Struct, frozen=True):
    """Who a rank is, for `/server_info` and for error texts."""

    rank: int
    coords: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.coords}) host {self.host} pid {self.pid}"


class ReplicaReady(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    ranks: tuple[RankInfo, ...]
    num_blocks: int
    block_size: int
    max_model_len: int
    """What fits the KV cache; never more than what was asked for."""
    num_slots: int = 1
    """Requests that can run at once."""
    enable_prefix_caching: bool = True


class ReplicaFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The first failure of the replica, as the line that every rank logs."""

    cause: str
    rank: int | None = None
    """The one to blame, if it is one."""


class DrainRequested(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """A rank got a signal. Travels peer -> leader -> front end, which drains the launch."""

    rank: int
    for_walltime: bool = False
    """The job is about to end: answers get the time that is left until then."""


class CallEnded(msgspec.Struct, frozen=True, array_like=True, tag="call_ended"):
    """What became of a ReplicaCall or ResetPrefixCache."""

    call_id: int
    value: bytes = b""
    """msgpack."""
    error_type: str = ""
    """Empty when there was no error; else the name of an EngineError, or of what the method
    raised."""
    message: str = ""
    where: str = ""
    """Rank and method, where a method raised."""
    traceback: str = ""


LeaderEvent = (
    StepReport | ReplicaReady | ReplicaFailed | DrainRequested | Heartbeat | CallEnded | Goodbye
)


# --- leader -> peers: one sequence of plans and device calls ----------------------------------


class SlotParams(msgspec.Struct, frozen=True, array_like=True):
    """The part of ChoiceParams that the device needs."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice_index: int
    logprobs: int | None
    num_prompt_tokens: int = 0
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """What may not be drawn before `min_tokens`; empty when that is 0."""


class SlotHistory(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a slot's penalties count but no plan brings: what the prefix cache held."""

    slot: int
    epoch: int
    token_ids: tuple[int, ...]
    """At positions 0, 1, …"""


class NewSlot(msgspec.Struct, frozen=True, array_like=True):
    """A request enters a slot (for the first time, or again after preemption)."""

    slot: int
    epoch: int
    params: SlotParams


class SlotStep(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one request in one step, at positions start, start + 1, …"""

    slot: int
    epoch: int
    start: int
    token_ids: tuple[int, ...]
    """Literal ids, or (PREV,)."""
    new_block_ids: tuple[int, ...]
    """Appended to the slot's block table; a slot that is new starts with an empty one."""
    sample: bool
    """Draw the token that follows the last of `token_ids`."""
    next_prompt_id: int = -1
    """The prompt token after the last of `token_ids`, where prompt logprobs need it and the step
    does not hold it."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """What every rank of the replica computes in one step: differences only."""

    new_slots: tuple[NewSlot, ...]
    steps: tuple[SlotStep, ...]
    share_sampled: bool = False
    """Hand the sampled ids to the ranks that embed, so that a later plan may say PREV."""
    history: tuple[SlotHistory, ...] = ()
    """For the output rank only; the executor leaves it out for the others. At most
    `--max-num-batched-tokens` ids."""

    def without_history(self) -> "StepPlan":
        return StepPlan(self.new_slots, self.steps, self.share_sampled)

    @property
    def is_empty(self) -> bool:
        return not self.steps

    @property
    def num_tokens(self) -> int:
        return sum(len(step.token_ids) for step in self.steps)


class DeviceCall(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Run a registered method of the worker on every rank of the replica."""

    method: str
    kwargs: dict[str, Any]


Job = StepPlan | DeviceCall | RemoteCall


class Ordered(msgspec.Struct, frozen=True, array_like=True, tag="ordered"):
    """A job with its place in the replica's sequence; a gap on arrival is an error."""

    seq: int
    job: Job


class PhaseBegan(msgspec.Struct, frozen=True, array_like=True, tag="phase_began"):
    """Every rank has entered: the engine may compute until PhaseEnded (engines inside a trainer's
    ranks; phases are counted from 1)."""

    phase: int


class PhaseEnded(msgspec.Struct, frozen=True, array_like=True, tag="phase_ended"):
    """The leader has left; no job follows before the next phase."""

    phase: int


PeerCommand = Ordered | Heartbeat | ReplicaFailed | Shutdown | PhaseBegan | PhaseEnded


# --- peers -> leader ---------------------------------------------------------------------------


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """The tokens one slot drew in a step; empty with `error` set when its logits were unusable."""

    slot: int
    epoch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str = ""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of prompt tokens at positions start, start + 1, …"""

    slot: int
    epoch: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """From the output rank: one `Sampled` for every SlotStep with `sample`."""

    seq: int
    sampled: tuple[Sampled, ...]
    weight_version: int = 0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class CallReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    seq: int
    value: Any


class RemoteReply(msgspec.Struct, frozen=True, array_like=True, tag="remote_reply"):
    """`value` is msgpack, empty on ranks whose value is not wanted."""

    seq: int
    value: bytes


class RemoteFailed(msgspec.Struct, frozen=True, array_like=True, tag="remote_failed"):
    """The method of a RemoteCall raised on this rank."""

    seq: int
    type_name: str
    message: str
    traceback: str


class JobFailed(msgspec.Struct, frozen=True, array_like=True, tag="job_failed"):
    """A job raised on this rank's device thread."""

    seq: int
    type_name: str
    message: str
    traceback: str


class PhaseEntered(msgspec.Struct, frozen=True, array_like=True, tag="phase_entered"):
    """This rank's program is ready for the phase."""

    phase: int


class EngineLeft(msgspec.Struct, frozen=True, array_like=True, tag="engine_left"):
    """This rank's program has left the engine: it enters no more phase."""


PeerEvent = (
    StepResult
    | CallReply
    | JobFailed
    | ReplicaFailed
    | Heartbeat
    | DrainRequested
    | PhaseEntered
    | EngineLeft
    | Goodbye
    | RemoteReply
    | RemoteFailed
)
