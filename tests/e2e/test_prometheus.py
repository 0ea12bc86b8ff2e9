"""A real Prometheus scrapes a launch and answers the dashboard's queries (opt-in: it is fetched as
Debian's package). Shown with 2.42.0."""

import asyncio
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.dashboards import dashboard, queries
from support.launching import END_S, STORIES, Launch, post
from support.prometheus import prometheus_programs, scraping

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model"),
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs Debian's packages"),
]

BODY = {"prompt": [1] + [7] * 40, "max_tokens": 8, "ignore_eos": True}
MIN_SCRAPES = 4
TURN = 20
"""Requests between looks at how far Prometheus is: nobody waits idly."""


async def value_of(session: aiohttp.ClientSession, expr: str) -> list[dict[str, Any]]:
    async with session.get("/api/v1/query", params={"query": expr}) as response:
        answer = await response.json()
    assert answer["status"] == "success", (expr, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


async def make_traffic(session: aiohttp.ClientSession, number: int) -> None:
    for index in range(TURN):
        await post(session, "/v1/completions", BODY | {"prompt": [1, 5, index, number % 500] * 9})
        await post(session, "/v1/completions", BODY)


async def test_every_query_of_the_dashboard_has_data(tmp_path: Path) -> None:
    """Of two front ends, which both know of both replicas."""
    endpoints = tmp_path / "endpoint"
    flags = ("--model", str(STORIES), "--api-ranks", "leaders", "--endpoint-file", str(endpoints))
    with Launch(*flags, num_ranks=2) as launch:
        for rank in (0, 1):
            launch.wait_line(rf"\[rank {rank} .*ready: .* at (\S+)")
        urls = [path.read_text().strip() for path in (endpoints, tmp_path / "endpoint.dp1")]
        with scraping(urls, tmp_path) as prometheus:
            async with (
                aiohttp.ClientSession(urls[0]) as first,
                aiohttp.ClientSession(urls[1]) as second,
                aiohttp.ClientSession(prometheus) as asked,
            ):
                await scraped(asked, first, second)
                silent = [
                    query for query in queries() if not await has_data(asked, query.filled("10s"))
                ]
                assert silent == []
                await check_variables(asked)
                await check_sums(asked, first, second)
                await check_text(first)


async def scraped(asked: aiohttp.ClientSession, *servers: aiohttp.ClientSession) -> None:
    """Traffic until both servers were scraped some times."""
    number = 0
    async with asyncio.timeout(END_S):
        while True:
            number += 1
            for server in servers:
                await make_traffic(server, number)
            counts = await value_of(asked, "count_over_time(up[10s]) * min_over_time(up[10s])")
            if [float(c["value"][1]) >= MIN_SCRAPES for c in counts] == [True] * len(servers):
                return


async def has_data(asked: aiohttp.ClientSession, expr: str) -> bool:
    return any(not math.isnan(float(found["value"][1])) for found in await value_of(asked, expr))


async def check_variables(asked: aiohttp.ClientSession) -> None:
    """What the dashboard's menus offer."""
    found = {}
    for variable in dashboard()["templating"]["list"][1:]:
        metric, label = variable["definition"].removeprefix("label_values(")[:-1].rsplit(", ", 1)
        params = {"match[]": metric.replace("$job", "aioengine")}
        async with asked.get(f"/api/v1/label/{label}/values", params=params) as response:
            found[variable["name"]] = (await response.json())["data"]
    assert found == {"job": ["aioengine"], "engine": ["0", "1"]}


async def check_sums(asked: aiohttp.ClientSession, *servers: aiohttp.ClientSession) -> None:
    """Front ends count their own requests: their sum is that of all. What leaders say is the same
    everywhere, so that nothing may add it up."""
    num_looked_up = await value_of(asked, "max by (engine) (aioengine:prefix_cache_queries_total)")
    by_instance = await value_of(asked, "aioengine:prefix_cache_queries_total")
    num_prompt_tokens = await value_of(asked, "sum by (instance) (aioengine:prompt_tokens_total)")
    assert (len(num_looked_up), len(by_instance), len(num_prompt_tokens)) == (2, 4, 2)
    assert all(float(found["value"][1]) > 0 for found in num_prompt_tokens + by_instance)


async def check_text(server: aiohttp.ClientSession) -> None:
    """Prometheus's own linter finds nothing but two kinds of names that are what they are."""
    async with server.get("/metrics") as response:
        text = await response.text()
    linter = await asyncio.create_subprocess_exec(
        *(prometheus_programs() / "promtool", "check", "metrics"),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, found = await linter.communicate(text.encode())
    known = ("metric names should not contain ':'", "restart_count non-histogram")
    complaints = [
        line for line in found.decode().splitlines() if not any(name in line for name in known)
    ]
    assert complaints == []
