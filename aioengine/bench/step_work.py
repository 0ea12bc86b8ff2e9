"""What the steps of a measured engine computed, from the plans that it ran. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.messages import StepPlan


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computed."""

    ended_s: float
    """When its result was here; `time.perf_counter()`."""
    num_requests: int
    num_tokens: int
    num_sampled: int
    num_kv_tokens: int
    """Whose keys and values attention reads, of all requests, with those that the step writes."""
    num_pairs: int
    """Of a query and a key that it may see."""

    @classmethod
    def of(cls, ended_s: float, plan: StepPlan) -> "Step":
        spans = [(step.start, len(step.token_ids)) for step in plan.steps]
        return cls(
            ended_s,
            num_requests=len(plan.steps),
            num_tokens=sum(length for _, length in spans),
            num_sampled=sum(step.sample for step in plan.steps),
            num_kv_tokens=sum(start + length for start, length in spans),
            num_pairs=sum(start * length + length * (length + 1) // 2 for start, length in spans),
        )

    @property
    def is_decode(self) -> bool:
        """One token for each request."""
        return self.num_tokens == self.num_requests


def full_decodes(steps: Sequence[Step], num_requests: int) -> list[tuple[float, Step]]:
    """Steps that gave each of so many requests a token, behind another such one; with the seconds
    between the two."""
    return [
        (later.ended_s - earlier.ended_s, later)
        for earlier, later in itertools.pairwise(steps)
        if earlier.is_decode and later.is_decode
        if earlier.num_requests == later.num_requests == num_requests
    ]
