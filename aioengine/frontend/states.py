"""States of a launch and its replicas, and reasons for refusals: for /health, errors, metrics."""

from typing import Literal

Health = Literal["starting", "ok", "degraded", "draining", "failed"]
ReplicaState = Literal["starting", "ready", "failed"]
Refusal = Literal["starting", "draining", "failed", "overloaded", "walltime"]
"""Why no new work is taken. walltime: it would not end before the job does."""
