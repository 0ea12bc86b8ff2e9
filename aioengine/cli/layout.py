"""Print where every rank of a launch would stand, its groups, nodes, layers and bytes.

Nothing is launched. Without --model nothing is read either.
"""

import argparse
import importlib
import json
import os
import sys
from typing import Any, Final

from aioengine.cli.layout_explain import explain
from aioengine.cli.layout_facts import LayoutFacts, ModelFacts
from aioengine.cli.layout_table import Page
from aioengine.config import EngineConfig
from aioengine.errors import EngineError
from aioengine.flags import CommandParser, add_flags, config_from
from aioengine.layout import Nodes, ParallelLayout

SETTINGS: Final = (
    "dtype",
    "max_model_len",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "external_data_parallel_size",
    "pipeline_layers",
    "device",
    "block_size",
    "kv_cache_memory_bytes",
    "api_ranks",
)
"""Of EngineConfig, those that change the answer; `--model` has a form of its own here."""
MAX_COUNT: Final = 2**20
"""Of processes, nodes and GPUs: every rank of a group is listed in memory."""


def configure(parser: CommandParser) -> None:
    what = parser.add_argument_group("what to show")
    what.add_argument(
        "--explain", type=_rank, metavar="RANK", help="One rank in sentences instead of tables."
    )
    what.add_argument(
        "--model",
        nargs="?",
        metavar="MODEL",
        help="Layers, heads, bytes of weights and KV cache as well; MODEL as in serve, without it "
        "the default model.",
    )
    what.add_argument("--all", action="store_true", help="Every rank and group of a large launch.")
    what.add_argument("--json", action="store_true", help="One JSON object.")
    where = parser.add_argument_group("where the ranks run")
    where.add_argument(
        "--nodes", type=_count, metavar="N", help="Mark groups that are on several of N nodes."
    )
    where.add_argument("--gpus-per-node", type=_count, metavar="N", help="Ranks of a full node.")
    where.add_argument(
        "--processes",
        type=_count,
        metavar="N",
        help="Fit the grid to N processes, as a launch does. Default: nodes × GPUs per node, else "
        "what the sizes need.",
    )
    add_flags(parser, SETTINGS)


def run(args: argparse.Namespace) -> int:
    given = vars(args)
    try:
        facts = gather(given)
        rank = given.get("explain")
        if rank is not None and rank >= facts.layout.launch_world_size:
            last = facts.layout.launch_world_size - 1
            raise ValueError(f"--explain {rank}: the ranks of this launch are 0 to {last}")
    except (ValueError, EngineError) as error:
        print(f"aioengine layout: error: {error}", file=sys.stderr)
        return 1
    explanation = None if rank is None else explain(facts, rank)
    if "json" in given:
        answer = facts.layout.table() | facts.extra_json()
        if explanation is not None:
            answer["explanation"] = explanation.json()
        return _put([json.dumps(answer)])
    page = Page(facts, full="all" in given)
    if explanation is None:
        page.add_tables()
    else:
        page.add_explanation(explanation)
    return _put(page.lines)


def _put(lines: list[str]) -> int:
    """Print, and return the exit status: a reader that has seen enough, such as head, is no error
    to talk about."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    return 0


def gather(given: dict[str, Any]) -> LayoutFacts:
    """From parsed flags. ValueError or EngineError for what cannot be launched so."""
    config = config_from(given)
    layout = fit(config, given)
    nodes = None
    if "nodes" in given or "gpus_per_node" in given:
        nodes = Nodes.fit(
            layout.launch_world_size,
            nodes=given.get("nodes"),
            gpus_per_node=given.get("gpus_per_node"),
        )
    model: ModelFacts | None = None
    if "model" in given or config.model is not None:
        # By name, and only when asked for: it brings torch.
        reader = importlib.import_module("aioengine.cli.layout_model")
        model = reader.read_model_facts(config, layout)
    return LayoutFacts(config, layout, nodes, model)


def fit(config: EngineConfig, given: dict[str, Any]) -> ParallelLayout:
    """The grid of so many processes as flags say, else of what the sizes need.

    ValueError that shows the product and what was found when they do not agree.
    """
    dp_size, external_dp_size = config.data_parallel_size, config.external_data_parallel_size
    num_processes, source = given.get("processes"), ""
    if num_processes is None and "nodes" in given and "gpus_per_node" in given:
        num_processes = given["nodes"] * given["gpus_per_node"]
        source = f"--nodes {given['nodes']} × --gpus-per-node {given['gpus_per_node']}: "
    if num_processes is None:
        if external_dp_size == "auto":
            raise ValueError(
                "--external-data-parallel-size auto is what a launch leaves over; --processes says "
                "how many it has"
            )
        dp_size = 1 if dp_size == "auto" else dp_size
        num_processes = (
            config.tensor_parallel_size
            * config.pipeline_parallel_size
            * config.prefill_context_parallel_size
            * dp_size
            * external_dp_size
        )
    try:
        return ParallelLayout.fit(
            num_processes,
            tp_size=config.tensor_parallel_size,
            pp_size=config.pipeline_parallel_size,
            pcp_size=config.prefill_context_parallel_size,
            dcp_size=config.decode_context_parallel_size,
            dp_size=dp_size,
            external_dp_size=external_dp_size,
        )
    except ValueError as error:
        raise ValueError(f"{source}{error}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    if len(text) > len(str(MAX_COUNT)) or int(text) > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_COUNT}, got {text!r}")
    return int(text)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a rank, 0 or more, got {text!r}")
    return int(text)
