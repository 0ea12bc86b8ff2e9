"""Worker: everything a rank computes. Lives on the device thread; every method blocks."""

import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aioengine.activity import Activity
from aioengine.checkpoint.source import ModelSource
from aioengine.config import EngineConfig
from aioengine.core.stages import split_layers
from aioengine.dist.worlds import (
    GroupOptions,
    Groups,
    ReplicaStore,
    ServedStore,
    connect_store,
    has_world,
    open_groups,
)
from aioengine.errors import StartupError
from aioengine.layers.attention import attention_backend
from aioengine.layers.forward_batch import ForwardBatch
from aioengine.layers.probes import layer_probes
from aioengine.layers.team import Team, open_team
from aioengine.layout import ParallelLayout
from aioengine.messages import RemoteCall, Sampled, StepPlan, StepResult
from aioengine.model_config import ModelConfig
from aioengine.models.llama import LlamaStage
from aioengine.rpc import rpc_method, run_method
from aioengine.timeline.probe import AnyProbe, Kind, Probe
from aioengine.worker.batch import BatchBuilder, Role, StepInputs
from aioengine.worker.device import check_dtype, device_id, select_device, set_cpu_threads
from aioengine.worker.graphs import StepGraphs
from aioengine.worker.kv_store import KVShape
from aioengine.worker.loading import StagePlan, describe_formats, load_stage, with_formats
from aioengine.worker.logit_rules import LogitRules
from aioengine.worker.memory import Memory, give_back_freed, num_kv_blocks
from aioengine.worker.pipeline import Feedback, StageLink
from aioengine.worker.prompt_logprobs import describe_prompts
from aioengine.worker.sampler import Sampler, SamplingBatch
from aioengine.worker.warmup import largest_plan, warm_up_plans

logger = logging.getLogger(__name__)

CALLS: Final[dict[str, Callable[..., Any]]] = {}
"""The methods of Worker that a DeviceCall may name."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def device_call(method: _Method) -> _Method:
    """Registers a method of Worker; its arguments and value must fit msgpack."""
    CALLS[method.__name__] = method
    return method


class Worker:
    """One rank's device, groups, stage, KV cache and slot tables; owns all of them.

    Start-up calls, in this order: open_device; with several ranks open_store (the leader),
    open_groups, close_store (the leader); load_model, num_kv_blocks, allocate_kv, warm_up.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: ParallelLayout,
        rank: int,
        model_config: ModelConfig,
        source: ModelSource,
        *,
        local_rank: int,
        local_world_size: int,
        omp_num_threads: int | None = None,
        node: str = "0",
    ) -> None:
        """`node` is the launcher's name for this host."""
        self.activity = Activity()
        """What the device thread is in."""
        self._config = config
        self._layout = layout
        self.rank = rank
        self._source = source
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self._omp_num_threads = omp_num_threads
        self._node = node
        self._max_model_len = config.max_model_len or model_config.max_position
        self._cfg = model_config
        self.dtype: torch.dtype = getattr(
            torch, model_config.dtype if config.dtype == "auto" else config.dtype
        )
        self.coords = coords = layout.coords(rank)
        self._output_rank = layout.output_rank_of(rank)
        self._role = Role(
            is_first=coords.pp == 0,
            is_last=coords.pp == layout.pp_size - 1,
            is_output=rank == self._output_rank,
        )
        self._layers = split_layers(model_config.num_layers, layout.pp_size, config.stage_layers())[
            coords.pp
        ]
        self._kv_shape = KVShape.of(
            self._cfg,
            self._layers,
            tp_rank=coords.tp,
            tp_size=layout.tp_size,
            block_size=config.block_size,
            dtype=self.dtype,
        )
        self._sampler = Sampler(config.logprobs_mode)
        self._store: ReplicaStore | None = None
        self._groups: Groups | None = None
        self.device: torch.device
        self._memory: Memory
        self.stage: LlamaStage
        self._builder: BatchBuilder
        self._graphs: StepGraphs
        self._rules: LogitRules
        self._link: StageLink
        self._feedback: Feedback | None
        self._team: Team | None = None

    # --- what the device thread calls

    @torch.inference_mode()
    def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        """Run a registered method; ValueError for any other name."""
        if method not in CALLS:
            raise ValueError(f"no device call {method!r}; there are {', '.join(sorted(CALLS))}")
        with self.activity.within(method):
            return CALLS[method](self, **kwargs)

    def prepare(self, seq: int, plan: StepPlan) -> None:
        """Post the receive for a plan that has arrived, in plan order."""
        if self._link.receives:
            with torch.inference_mode():
                self._link.prepare(seq, plan.num_tokens)

    @torch.inference_mode()
    def execute(self, seq: int, plan: StepPlan) -> StepResult | None:
        """Compute a prepared plan. The output rank returns its result, the others None."""
        with self.activity.within(f"step {seq}", seq):
            assert self._groups is not None
            self._groups.tp.enter_job(seq)
            return self._step(seq, plan)

    @torch.inference_mode()
    def remote(self, seq: int, call: RemoteCall) -> bytes:
        """Run a method of `collective_rpc`, which gets this worker and the call's arguments.

        Returns and raises what `run_method` does.
        """
        with self.activity.within(f"collective_rpc {call.method}"):
            if self._groups is not None:  # a method's collectives are this job's
                self._groups.tp.enter_job(seq)
            try:
                return run_method(call, self, self.rank - self._layout.leader_of(self.rank))
            finally:
                self._graphs.forget()

    def probes(self) -> list[AnyProbe]:
        """What of a step can be timed, once the replica is ready."""
        probes: list[AnyProbe] = [
            Probe(self, "execute", Kind.STEP),
            Probe(self, "call", Kind.OTHER_JOB),
            Probe(self, "remote", Kind.OTHER_JOB),
            Probe(self, "_last_ids", Kind.RECEIVE_IDS),
            Probe(self, "_sample", Kind.SAMPLE),
            *self._stage_probes(),
            *self._graphs.probes(),
            *self._builder.probes(),
            *self._link.probes(),
        ]
        if self._feedback is not None:
            probes.append(Probe(self._feedback, "publish", Kind.SEND_IDS))
        return probes

    def _stage_probes(self) -> list[Probe]:
        assert self._groups is not None
        return [
            Probe(self.stage, "forward", Kind.LAYERS),
            Probe(self.stage, "compute_logits", Kind.LOGITS),
            *layer_probes(self.stage),
            *self._groups.tp.probes(),
        ]

    # --- start-up and end

    @device_call
    def open_device(self) -> str:
        """Select the device and check the type. An id of the device: see `device_id`."""
        self.device = select_device(self._config.device, self._local_rank)
        check_dtype(self.dtype, self.device)
        self._memory = Memory.measure(self.device, self._local_world_size)
        num_threads = set_cpu_threads(
            self._config.cpu_threads,
            self._omp_num_threads,
            self._local_rank,
            self._local_world_size,
        )
        if self.device.type == "cpu":
            self._team = open_team(num_threads)
        logger.info("computing on %s in %s, %d threads", self.device, self.dtype, num_threads)
        if self._layout.world_size == 1:
            self._build_groups()
        return device_id(self.device)

    @device_call
    def open_store(self, host: str) -> int:
        """Serve the store of this replica's process groups, on the leader; its port.

        0 in a trainer's world, which has a store.
        """
        if has_world():
            return 0
        self._store = ServedStore(host)
        return self._store.port

    @device_call
    def close_store(self) -> None:
        """On the leader, once the groups are built: no rank has to come any more."""
        if isinstance(self._store, ServedStore):
            self._store.stop_listening()

    @device_call
    def open_groups(self, host: str, port: int) -> None:
        """Build the process groups over the store at this address (port 0: a trainer's)."""
        if self._store is None and port:
            self._store = connect_store(host, port, self._config.startup_timeout_seconds)
        self._build_groups()

    @device_call
    def load_model(self) -> None:
        """Build this rank's stage and read its weights; progress on global rank 0."""
        assert self._groups is not None
        plan = StagePlan(
            self._cfg,
            self._layers,
            is_first=self._role.is_first,
            is_last=self._role.is_last,
            tp=self._groups.tp,
            dtype=self.dtype,
            team=self._team,
        )
        plan = self._with_formats(plan)
        self._memory.check_weights(plan.num_bytes, self.dtype)
        self.stage = load_stage(plan, self._source, self.device, speaks=self.rank == 0)
        self._graphs = StepGraphs(
            self.stage,
            self._decode,
            self._stage_probes(),
            team=self._team,
            tp=self._groups.tp,
            activity=self.activity,
        )
        give_back_freed()

    @device_call
    def num_kv_blocks(self) -> int:
        """How many KV blocks this rank can hold, the null block included."""
        if self.device.type == "cuda" and self._config.kv_cache_memory_bytes is None:
            self._profile()
        return num_kv_blocks(
            self._config,
            budget=self._memory.kv_budget(self._config),
            block_bytes=self._kv_shape.block_bytes,
            max_model_len=self._max_model_len,
        )

    @device_call
    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the cache and empty slot tables; `num_blocks` includes the null block."""
        room = (num_blocks - 1) * self._config.block_size
        is_cut = self._config.max_model_len is None and room < self._max_model_len
        if is_cut and self.rank == self._layout.leader_of(self.rank):
            logger.info(
                "without --max-model-len the context is what fits the KV cache: %d tokens of the "
                "model's %d",
                room,
                self._max_model_len,
            )
        self._allocate(num_blocks)

    @device_call
    def warm_up(self) -> None:
        """A tiny prefill and decode on the whole replica, so that the first request is fast."""
        config = self._config
        for plan in warm_up_plans(
            config.max_num_batched_tokens, self._max_model_len, config.block_size
        ):
            self._rehearse(plan)

    @device_call
    def close(self) -> None:
        """Orderly end: every rank of the replica calls it after its last plan."""
        if self._team is not None:
            self._team.close()
        if self._groups is None:
            return
        self._link.close()
        if self._feedback is not None:
            self._feedback.close()
        self._groups.close()
        self._groups = None

    @device_call
    def abandon(self) -> None:
        """The end after a failure: frees what this process holds, and waits for no transfer, as
        the rank at its other end may be gone."""
        if self._team is not None:
            self._team.close()
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    def _with_formats(self, plan: StagePlan) -> StagePlan:
        """What `--quantization` comes to on this rank's device."""
        quantization = self._config.quantization
        if self.device.type != "cpu":
            if quantization in ("int8", "int4"):
                raise StartupError(
                    f"--quantization {quantization} runs on CPU only, this rank computes on "
                    f"{self.device}: use --quantization none, or a narrower --dtype"
                )
            return plan
        if self._team is None and quantization == "auto":
            return plan  # torch would make floats of them in every step
        plan = with_formats(plan, self._source, quantization)
        if plan.formats and self.rank == self._layout.leader_of(self.rank):
            logger.info("%s", describe_formats(plan))
        return plan

    def _build_groups(self) -> None:
        config = self._config
        self._groups = open_groups(
            self._layout,
            self.rank,
            self._store,
            GroupOptions(
                device=self.device,
                timeout_s=config.group_timeout_s,
                node=self._node,
                num_local_ranks=self._local_world_size,
                custom_all_reduce=not config.disable_custom_all_reduce,
                activity=self.activity,
            ),
        )
        self._link = StageLink(
            self._groups.pp,
            max_num_batched_tokens=config.max_num_batched_tokens,
            hidden_size=self._cfg.hidden_size,
            dtype=self.dtype,
            max_plans_in_flight=config.max_plans_in_flight,
        )
        feedback = self._groups.feedback
        self._feedback = None
        if feedback is not None:
            self._feedback = Feedback(
                feedback,
                source=feedback.ranks.index(self._output_rank),
                num_slots=config.num_slots,
                max_plans_in_flight=config.max_plans_in_flight,
            )

    def _allocate(self, num_blocks: int) -> None:
        # A request holds no more blocks than there are; plans of the null block alone may.
        room = (num_blocks - 1) * self._config.block_size
        longest = max(room, self._config.max_num_batched_tokens + self._config.block_size)
        attention = attention_backend(self.device.type, self._config.block_size, self._team)
        self._builder = BatchBuilder(
            self._role,
            self._kv_shape.allocate(num_blocks, self.device, attention),
            num_slots=self._config.num_slots,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_model_len=min(self._max_model_len, longest),
            block_size=self._config.block_size,
            device=self.device,
            attention=attention.begin,
            num_microbatches=self._config.pipeline_parallel_size,
        )
        self._rules = LogitRules(self._config.num_slots, self._cfg.vocab_size, self.device)

    def _profile(self) -> None:
        """Run the largest step over a cache of the null block alone, for the peak of memory."""
        config = self._config
        self._allocate(1)
        torch.cuda.reset_peak_memory_stats()
        self._rehearse(
            largest_plan(
                config.max_num_batched_tokens,
                self._max_model_len,
                config.num_slots,
                config.block_size,
            )
        )
        torch.cuda.synchronize()

    def _rehearse(self, plan: StepPlan) -> None:
        self._link.prepare(0, plan.num_tokens)
        self._step(0, plan)

    # --- one step

    def _step(self, seq: int, plan: StepPlan) -> StepResult | None:
        if self._team is not None:
            self._team.wake()
        inputs = self._builder.build(plan, self._last_ids)
        result = self._compute(seq, plan, inputs)
        num_sampled = len(inputs.sampled_slots_S)
        if plan.share_sampled and num_sampled and self._feedback and not self._role.is_output:
            self._feedback.expect(inputs.sampled_slots_S, inputs.sampled_slots)
        return result

    def _compute(self, seq: int, plan: StepPlan, inputs: StepInputs) -> StepResult | None:
        """The stage, and what becomes of its hidden states: the next stage gets them, or the whole
        tp group computes logits, and the output rank makes the result of them."""
        is_last, is_output = self._role.is_last, self._role.is_output
        received_TD = self._link.receive(seq)
        if is_output:
            self._rules.observe(plan)
        if inputs.sample_rows_S is None:
            computed = self._graphs.run(inputs.forward, received_TD)
            if not is_last:
                self._link.send(computed.clone())  # it is overwritten before all of it has left
                return None
            if inputs.sampling is None:
                return None
            return StepResult(seq, self._sample(plan, inputs, inputs.sampling, computed))
        hidden_TD: Tensor = self.stage(inputs.forward, received_TD)
        if not is_last:
            self._link.send(hidden_TD)
            return None
        sampled: tuple[Sampled, ...] = ()
        if len(inputs.sampled_slots_S):
            logits_SV = self.stage.compute_logits(hidden_TD.index_select(0, inputs.sample_rows_S))
            if inputs.sampling is not None:
                sampled = self._sample(plan, inputs, inputs.sampling, logits_SV)
        described = describe_prompts(
            inputs.prompt_chunks, hidden_TD, self.stage.compute_logits, is_output=is_output
        )
        return StepResult(seq, sampled, prompt_logprobs=described) if is_output else None

    def _decode(self, batch: ForwardBatch, received_TD: Tensor | None) -> Tensor:
        """A step in which every row decodes: logits, on the last stage, or hidden states."""
        hidden_TD: Tensor = self.stage(batch, received_TD)
        return self.stage.compute_logits(hidden_TD) if self._role.is_last else hidden_TD

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, sampling: SamplingBatch, logits_SV: Tensor
    ) -> tuple[Sampled, ...]:
        """Ids leave for the ranks that embed before the host looks at them."""
        processed_SV = self._rules.process(logits_SV, sampling)
        draws = self._sampler.draw(processed_SV, sampling)
        if plan.share_sampled:
            assert self._feedback is not None
            self._feedback.publish(inputs.sampled_slots_S, draws.ids_R)
        self._rules.record(sampling, draws.ids_R)
        return self._sampler.report(logits_SV, processed_SV, draws, sampling)

    def _last_ids(self, slots: NDArray[np.int64]) -> Tensor:
        assert self._feedback is not None
        return self._feedback.last_ids(slots)


@rpc_method
def rank_info(worker: Worker) -> dict[str, Any]:
    """For `collective_rpc`: who this rank is, and what it computes on."""
    return {
        "rank": worker.rank,
        "coords": str(worker.coords),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(worker.device),
        "dtype": str(worker.dtype).removeprefix("torch."),
    }
