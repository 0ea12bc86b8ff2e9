"""Settings from the command line and from TOML, and what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioengine.cli.rank_flags import add_model_argument, given_flags
from aioengine.config import EngineConfig, config_differences, refuse_unsupported
from aioengine.flags import GROUPS, CommandParser, add_flags, build_parser, parse_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

CONTRACT_FLAGS = """
--model --tokenizer --served-model-name --dtype --max-model-len --seed --quantization
--chat-template --logprobs-mode
--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp
--prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp
--external-data-parallel-size --pipeline-layers --enable-expert-parallel
--disable-custom-all-reduce --distributed-executor-backend
--device --cpu-threads --max-num-seqs --max-num-batched-tokens --block-size
--kv-cache-memory-bytes --gpu-memory-utilization --enable-prefix-caching
--no-enable-prefix-caching --async-scheduling --no-async-scheduling
--startup-timeout-seconds --heartbeat-seconds --step-timeout-seconds
--distributed-timeout-seconds --shutdown-timeout --walltime-margin --kill-frozen --no-kill-frozen
--host --port --endpoint-file --api-ranks --api-key --admin-api-key --root-path
--max-concurrent-requests --metrics-require-key --allowed-origins --uds --ssl-certfile
--ssl-keyfile --enable-log-requests --max-log-len
--host-ip --config --log-level --log-dir
"""


def parse(*argv: str) -> EngineConfig:
    return parse_config(build_parser("aioengine", "test"), argv)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_help_has_every_flag_of_the_contract_in_its_groups() -> None:
    text = build_parser("aioengine", "test").format_help()
    words = set(text.replace(",", " ").split())
    assert [flag for flag in CONTRACT_FLAGS.split() if flag not in words] == []
    for title in GROUPS.values():
        assert f"\n{title}:\n" in text


def test_no_flags_are_the_defaults() -> None:
    assert parse() == EngineConfig()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--tensor-parallel-size=4"], "tensor_parallel_size", 4),
        (["--seed", str(2**63 - 1)], "seed", 2**63 - 1),
        (["-dp", "3"], "data_parallel_size", 3),
        (["--model", "123"], "model", "123"),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--shutdown-timeout", "0"], "shutdown_timeout", 0.0),
        (["--no-async-scheduling"], "async_scheduling", False),
        (["--metrics-require-key"], "metrics_require_key", True),
        (["--api-key", "a", "b"], "api_key", ("a", "b")),
        (["--api-key", "a", "--api-key=b"], "api_key", ("a", "b")),
        (["--api-key", "[a"], "api_key", ("[a",)),
        (
            ["--allowed-origins", '["https://a", "https://b"]'],
            "allowed_origins",
            ("https://a", "https://b"),
        ),
        (["--enable-log-requests"], "enable_log_requests", True),
        (["--port", "0"], "port", 0),
        (["-pp", "2", "--pipeline-layers", "3,2"], "pipeline_layers", "3,2"),
    ],
)
def test_a_flag_sets_its_field(argv: list[str], field: str, value: Any) -> None:
    given = _non_defaults(parse(*argv))
    assert given.pop(field) == value
    assert given.keys() <= {"pipeline_parallel_size"}


def _non_defaults(config: EngineConfig) -> dict[str, Any]:
    default = msgspec.structs.asdict(EngineConfig())
    return {k: v for k, v in msgspec.structs.asdict(config).items() if v != default[k]}


@pytest.mark.parametrize(
    "argv",
    [
        ["--tensor-parallel-size", "0"],
        ["--tensor-parallel-size", "two"],
        ["--tensor-parallel-size", "1.5"],
        ["--data-parallel-size", "0"],
        ["--data-parallel-size", "some"],
        ["--external-data-parallel-size", "-1"],
        ["--dtype", "int8"],
        ["--device", "tpu"],
        ["--port", "65536"],
        ["--max-num-seqs", "65537"],
        ["--gpu-memory-utilization", "0"],
        ["--gpu-memory-utilization", "1.1"],
        ["--heartbeat-seconds", "0"],
        ["--shutdown-timeout", "-1"],
        ["--walltime-margin", "-1"],
        ["--seed", "-1"],
        ["--seed", str(2**63)],
        ["--root-path", "llm"],
        ["--root-path", "/llm/"],
        ["--api-key", ""],
        ["--max-log-len", "-1"],
        ["--pipeline-layers", "3,2"],
        ["--pipeline-layers", "0"],
        ["--pipeline-layers", "all"],
    ],
    ids=" ".join,
)
def test_an_error_names_the_flag_and_what_was_found(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^--") as caught:
        parse(*argv)
    flag, value = argv
    assert str(caught.value).startswith(f"{flag}: ")
    assert value in str(caught.value)


@pytest.mark.parametrize("argv", [["--nonsense"], ["--tensor-parallel", "2"], ["--port"]])
def test_unknown_and_shortened_flags_end_with_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.toml",
        'tensor_parallel_size = 2\nport = 9000\ndata_parallel_size = "auto"\n'
        "async_scheduling = false\nshutdown_timeout = 3\n",
    )
    config = parse("--port", "9001", "--config", path, "--async-scheduling")
    assert _non_defaults(config) == {
        "tensor_parallel_size": 2,
        "port": 9001,
        "shutdown_timeout": 3.0,
    }


@pytest.mark.parametrize("model", ["org/model", "./model", "/models/a", "a.gguf", "../m"])
def test_a_model_is_no_api_key(model: str) -> None:
    parser = CommandParser(prog="aioengine serve")
    add_model_argument(parser)
    add_flags(parser)
    with pytest.raises(ValueError, match="MODEL, which must come before --api-key"):
        given_flags(parser.parse_args(["--api-key", "key", model]))
    given = given_flags(parser.parse_args([model, "--api-key", "key", "other"]))
    assert (given["model"], given["api_key"]) == (model, ["key", "other"])


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    common = write(tmp_path / "common.toml", "port = 9000\ntensor_parallel_size = 2\n")
    secret = write(tmp_path / "secret.toml", 'port = 9001\napi_key = "k"\n')
    config = parse("--config", common, "--config", secret)
    assert _non_defaults(config) == {"tensor_parallel_size": 2, "port": 9001, "api_key": ("k",)}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tensor_parallel = 2", "unknown setting 'tensor_parallel'"),
        ("tensor-parallel-size = 2", "unknown setting 'tensor-parallel-size'"),
        ("port = 70000", "port: "),
        ('port = "8000"', "port: "),
        ("async_scheduling = 1", "async_scheduling: "),
        ('dtype = "int8"', "dtype: "),
        ("port = ", "--config"),
        ("[engine]\nport = 1", "unknown setting 'engine'"),
    ],
)
def test_errors_in_the_file_name_it_and_the_key(tmp_path: Path, text: str, shown: str) -> None:
    path = write(tmp_path / "a.toml", text)
    with pytest.raises(ValueError, match="--config") as caught:
        parse("--config", path)
    assert path in str(caught.value)
    assert shown in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--config .*absent\.toml: No such file"):
        parse("--config", str(tmp_path / "absent.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"--config .*binary\.toml"):
        parse("--config", str(tmp_path / "binary.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_worked_examples_can_run(path: Path) -> None:
    refuse_unsupported(parse("--config", str(path)))


def test_there_are_worked_examples() -> None:
    assert len(CONFIGS) >= 2


@pytest.mark.parametrize(
    "argv",
    [
        ["--prefill-context-parallel-size", "2"],
        ["--decode-context-parallel-size", "2"],
        ["--external-data-parallel-size", "2"],
        ["--external-data-parallel-size", "auto"],
        ["--enable-expert-parallel"],
        ["--quantization", "int4", "--device", "cuda"],
    ],
    ids=" ".join,
)
def test_what_does_not_run_yet_is_refused_with_a_sentence(argv: list[str]) -> None:
    config = parse(*argv)
    with pytest.raises(ValueError, match=f"^{argv[0]}.* does not run yet"):
        refuse_unsupported(config)


def test_the_defaults_are_not_refused() -> None:
    refuse_unsupported(EngineConfig())


def test_stage_layers() -> None:
    assert EngineConfig().stage_layers() is None
    config = parse("-pp", "3", "--pipeline-layers", "4, 3,3")
    assert config.stage_layers() == (4, 3, 3)


def test_differences_between_ranks_are_listed_by_field() -> None:
    mine, theirs = parse("-tp", "2", "--log-dir", "a"), parse("-tp", "4", "--log-dir", "b")
    assert config_differences(mine, mine) == []
    assert config_differences(mine, theirs) == ["tensor_parallel_size: 2 != 4"]


def test_a_config_survives_json() -> None:
    config = parse("-tp", "2", "--model", "m", "-dp", "auto", "--shutdown-timeout", "3")
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
