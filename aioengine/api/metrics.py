"""/metrics: the engine's figures, those of HTTP, and those of this process."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, get_args

from aiohttp import hdrs, web
from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.process_collector import ProcessCollector

from aioengine.api.context import API
from aioengine.api.errors import ApiError
from aioengine.api.handlers import PROBES, Handler, route_of
from aioengine.frontend.metrics import PREFIX
from aioengine.frontend.states import Refusal

OTHER: Final = "other"
"""What is no route."""
CLIENT_LEFT: Final = "left"
"""In place of a status: the client did not wait for one, or for the end of its stream."""
STATUSES: Final = ("2xx", "4xx", "5xx", CLIENT_LEFT)
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class HttpMetrics:
    """What one HTTP server was asked for. Every series exists from the start."""

    def __init__(self, routes: Iterable[str]) -> None:
        """`routes` as `route_of` names them."""
        names = (*sorted(routes), OTHER)
        self._counts = {(route, status): 0 for route in names for status in STATUSES}
        self._num_refused: dict[str, int] = dict.fromkeys(get_args(Refusal), 0)
        self.num_in_progress = 0
        self.num_slow_readers = 0

    def count(self, route: str | None, status: str) -> None:
        self._counts[route or OTHER, status] += 1

    def count_refusal(self, error: ApiError) -> None:
        """If it is one: other failures are no refusals."""
        if error.status == 503 and error.code in self._num_refused:
            self._num_refused[error.code] += 1

    def collect(self) -> Iterator[Metric]:
        """What a registry asks for."""
        requests = CounterMetricFamily(
            f"{PREFIX}http_requests",
            "Requests answered, by route and class of status; left: the client did not wait.",
            labels=["handler", "status"],
        )
        for labels, count in self._counts.items():
            requests.add_metric(labels, count)
        yield requests
        refused = CounterMetricFamily(
            f"{PREFIX}http_requests_refused",
            "Requests answered 503 because no new work was taken, by reason.",
            labels=["reason"],
        )
        for reason, count in self._num_refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield GaugeMetricFamily(
            f"{PREFIX}http_requests_in_progress",
            "Requests whose answer is not complete; probes and scrapes are left out.",
            self.num_in_progress,
        )
        yield GaugeMetricFamily(
            f"{PREFIX}http_slow_readers",
            "Streams whose client is behind: events wait for it and merge.",
            self.num_slow_readers,
        )


HTTP_METRICS: Final = web.AppKey("http_metrics", HttpMetrics)
PROCESS: Final = ProcessCollector(registry=None)


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    figures, route = request.app[HTTP_METRICS], route_of(request)
    is_work = route not in PROBES
    figures.num_in_progress += is_work
    status = CLIENT_LEFT
    try:
        response = await handler(request)
        status = f"{response.status // 100}xx"
        return response
    finally:
        figures.num_in_progress -= is_work
        figures.count(route, status)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus's text format, whatever was asked for."""
    # Not OpenMetrics: prometheus_client 0.26 turns the colon of our names into an underscore there.
    api = request.app[API]
    families = [*api.front_end.metrics.collect(), *request.app[HTTP_METRICS].collect()]
    body = await api.text.run(_render, families)
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: TEXT})


def _render(families: Sequence[Metric]) -> bytes:
    """With the process's own figures, which are read from files."""
    return generate_latest(_Collected(families)) + generate_latest(PROCESS)


class _Collected:
    """A collector of what is collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
