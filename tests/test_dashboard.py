"""The Grafana dashboard's form: what Grafana needs to show it as it was meant. Its queries meet a
server in e2e/test_metrics.py."""

import itertools
import re
from typing import Any

import promql_parser as promql
import pytest
from support.dashboards import Query, Series, dashboard, queries

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
PANELS = dashboard()["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]

each_graph = pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])


def test_the_frame() -> None:
    found = dashboard()
    assert (found["id"], found["uid"], found["title"]) == (None, "aioengine", "aioengine")
    assert found["schemaVersion"] >= 38, "Grafana 10"
    assert "__inputs" not in found, "provisioning fills none in"
    needed = {item["id"] for item in found["__requires"] if item["type"] == "panel"}
    assert needed == {panel["type"] for panel in GRAPHS}
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Health and replicas", "Traffic", "Latency", "Load", "HTTP"]


def test_no_data_source_but_the_chosen_one() -> None:
    """An id of somebody's own Grafana would make panels without data in all others."""

    def sources(part: Any) -> list[Any]:
        match part:
            case dict():
                inner = [source for value in part.values() for source in sources(value)]
                return [*([part["datasource"]] if "datasource" in part else []), *inner]
            case list():
                return [source for value in part for source in sources(value)]
        return []

    found = sources(dashboard())
    assert len(found) > 2 * len(GRAPHS)
    assert all(source == DATASOURCE for source in found)


def test_variables() -> None:
    found = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert [*found] == ["datasource", "job", "engine"]
    assert (found["datasource"]["type"], found["datasource"]["query"]) == (
        "datasource",
        "prometheus",
    )
    assert (found["engine"]["includeAll"], found["engine"]["allValue"]) == (True, ".*")
    assert not found["job"]["multi"], "engines of several launches have the same names"


def test_ids_and_titles_are_unique() -> None:
    for key in ("id", "title"):
        values = [panel[key] for panel in PANELS]
        assert len({*values}) == len(values)


def test_no_panel_covers_another() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert 0 <= x < x + w <= COLUMNS, panel["title"]
        covered = {*itertools.product(range(x, x + w), range(y, y + h))}
        assert not covered & cells, panel["title"]
        cells |= covered


@each_graph
def test_a_panel_has_a_unit_a_description_and_queries(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert re.fullmatch(r"\S.{10,120}\.", panel["description"])
    refs = [target["refId"] for target in panel["targets"]]
    assert len({*refs}) == len(refs) > 0
    formats = {target.get("format") for target in panel["targets"]}
    assert formats == ({"heatmap"} if panel["type"] == "heatmap" else {None})


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.expr)
def test_a_query_is_promql_and_of_one_launch(query: Query) -> None:
    parsed = query.filled()
    promql.parse(parsed)
    assert query.expr.count('job="$job"') == len(re.findall(r"[a-z]\{", query.expr))


BROKEN = {
    "nothing matches": 'a:g{job="elsewhere"}',
    "there is no a:none": "sum(a:none)",
    "there is no label": 'a:g{engine=~".*",x=~".*"}',
    "only ever grows": "sum(a:c_total)",
    "falls, too": "rate(a:g[1m])",
    "by {'x'}": "sum by (x) (rate(a:c_total[1m]))",
    "all bounds added up": "sum(rate(a:h_bucket[1m]))",
    "quantiles without buckets": "histogram_quantile(0.5, sum by (engine) (rate(a:c_total[1m])))",
    "the legend": "sum(rate(a:c_total[1m]))",
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_what_would_show_no_data_is_found(complaint: str) -> None:
    """The checks themselves can fail."""
    labels = (("engine", "0"),)
    found = {
        ("a:g", labels): 1.0,
        ("a:c_total", labels): 1.0,
        ("a:h_bucket", (*labels, ("le", "1.0"))): 1.0,
    }
    series = Series(found, {"a:g": "gauge", "a:c": "counter", "a:h": "histogram"})
    series.check(Query("", 'a:g{engine="0"} == 1', "{{engine}} {{instance}}"))
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        series.check(Query("", BROKEN[complaint], "{{engine}}"))
