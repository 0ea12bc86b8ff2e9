"""What a step must move and compute, and what share of a machine's limits it reaches. Pure.

A step cannot be quicker than reading its bytes at memory speed, nor than its operations at the
best matmul rate; whichever takes longer is its limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.bench.step_work import Step
from aioengine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight matrix; those that have the same input count as one."""

    name: str
    in_features: int
    out_features: int

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features


def layer_linears(cfg: ModelConfig) -> tuple[Linear, ...]:
    """Of one decoder layer."""
    heads = cfg.num_heads * cfg.head_dim
    kv_heads = cfg.num_kv_heads * cfg.head_dim
    return (
        Linear("qkv", cfg.hidden_size, heads + 2 * kv_heads),
        Linear("o", heads, cfg.hidden_size),
        Linear("gate_up", cfg.hidden_size, 2 * cfg.intermediate_size),
        Linear("down", cfg.intermediate_size, cfg.hidden_size),
    )


def head_linear(cfg: ModelConfig) -> Linear:
    return Linear("head", cfg.hidden_size, cfg.vocab_size)


@dataclass(frozen=True, slots=True)
class Model:
    """What the arithmetic needs to know."""

    cfg: ModelConfig
    dtype: str
    read_bytes: int
    """Of the weights that every step reads: all, but an embedding that is not the head as well."""
    kv_token_bytes: int
    """Keys and values of one token in all layers."""


@dataclass(frozen=True, slots=True)
class Work:
    num_bytes: int
    """That memory must give."""
    num_flops: int
    """A multiplication and an addition are two."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)


def step_work(model: Model, step: Step) -> Work:
    """Weights and the keys and values once; linear layers, head and attention."""
    cfg = model.cfg
    per_token = cfg.num_layers * sum(linear.num_weights for linear in layer_linears(cfg))
    linear = 2 * (step.num_tokens * per_token + step.num_sampled * head_linear(cfg).num_weights)
    # Scores and weighted values: head_dim multiplications each, of every pair, head and layer.
    attention = 4 * step.num_pairs * cfg.num_heads * cfg.head_dim * cfg.num_layers
    return Work(
        model.read_bytes + step.num_kv_tokens * model.kv_token_bytes,
        linear + attention,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the machine, with as many threads as the engine has."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What the engine did, and how long it took: the median of repetitions."""

    name: str
    steps: Sequence[Step]
    seconds: float
    num_tokens: int
    """By which its speed is counted."""


@dataclass(frozen=True, slots=True)
class Share:
    """How near a phase comes to the limits. 1 is all that the machine can do."""

    name: str
    seconds: float
    num_bytes: int
    num_flops: int
    of_memory: float
    of_matmul: float
    tokens_per_s: float
    limit_tokens_per_s: float

    @property
    def limit(self) -> str:
        """What such a phase waits for when all is well."""
        return "memory" if self.of_memory >= self.of_matmul else "matmul"


def judge(model: Model, phase: Phase, limits: Limits) -> Share:
    work = Work(0, 0)
    for step in phase.steps:
        work += step_work(model, step)
    memory_s = work.num_bytes / limits.bytes_per_s
    matmul_s = work.num_flops / limits.flops_per_s
    return Share(
        phase.name,
        phase.seconds,
        work.num_bytes,
        work.num_flops,
        memory_s / phase.seconds,
        matmul_s / phase.seconds,
        phase.num_tokens / phase.seconds,
        phase.num_tokens / max(memory_s, matmul_s),
    )
