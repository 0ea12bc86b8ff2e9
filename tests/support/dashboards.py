"""The Grafana dashboard, and what its queries would find: PromQL is parsed by `promql-parser` (the
grammar of Prometheus), and each query is followed down to the series of a scrape."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
from promql_parser import MatchOp
from support.exposition import Samples

DASHBOARD = Path(__file__).parents[2] / "launch" / "grafana" / "aioengine.json"
OF_SCRAPES = {"job": "aioengine", "instance": "host:8000"}
"""Labels that Prometheus adds."""


@dataclass(frozen=True, slots=True)
class Query:
    panel: str
    expr: str
    legend: str

    def filled(self, rate_interval: str = "1m", **variables: str) -> str:
        """As Grafana sends it."""
        text = self.expr.replace("$__rate_interval", rate_interval)
        for name, value in {"job": "aioengine", "engine": ".*", **variables}.items():
            text = text.replace(f"${name}", value)
        assert "$" not in text, text
        return text

    def counters(self) -> set[str]:
        """Of which it takes rates."""
        return {*re.findall(r"rate\(([\w:]+)", self.expr)}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> list[Query]:
    return [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


class Series:
    """What a scrape of some servers brought, as queries see it."""

    def __init__(self, found: Samples, types: Mapping[str, str]) -> None:
        """`types` of families by name."""
        self._found = {
            (name, tuple(sorted({**OF_SCRAPES, **dict(labels)}.items()))): value
            for (name, labels), value in found.items()
        }
        self._types = types

    def check(self, query: Query) -> None:
        """AssertionError for what would be no data, or nonsense."""
        labels = self._labels(promql.parse(query.filled()))
        shown = {*re.findall(r"\{\{(\w+)\}\}", query.legend)}
        assert shown <= labels, f"the legend {query.legend} of labels {labels}"

    def _labels(self, expr: Any) -> set[str]:
        """Names of the labels of the result; empty for scalars, too."""
        match expr:
            case promql.NumberLiteral():
                return set()
            case promql.VectorSelector():
                assert self._kind(expr.name) == "gauge", f"{expr.name} only ever grows"
                return self._labels_of(expr)
            case promql.AggregateExpr():
                return self._aggregated(expr)
            case promql.BinaryExpr():
                left, right = self._labels(expr.lhs), self._labels(expr.rhs)
                is_scalar = isinstance(expr.rhs, promql.NumberLiteral)
                assert left == right or is_scalar or expr.lhs.prettify() == "time()"
                return left
            case promql.Call():
                return self._called(expr)
        raise AssertionError(f"no rule for {type(expr)}")

    def _aggregated(self, expr: Any) -> set[str]:
        labels = self._labels(expr.expr)
        kept = set() if expr.modifier is None else {*expr.modifier.labels}
        assert kept <= labels, f"by {kept - labels} of {labels}"
        if "le" in labels:
            assert "le" in kept, "buckets of all bounds added up"
            assert str(expr.op) == "sum"
        return kept

    def _called(self, expr: Any) -> set[str]:
        match expr.func.name:
            case "time":
                return set()
            case "rate":
                selector = expr.args[0].vector_selector
                assert self._kind(selector.name) == "counter", f"{selector.name} falls, too"
                return self._labels_of(selector)
            case "histogram_quantile":
                labels = self._labels(expr.args[1])
                assert "le" in labels, "quantiles without buckets"
                return labels - {"le"}
        raise AssertionError(f"no rule for {expr.func.name}()")

    def _labels_of(self, selector: Any) -> set[str]:
        found = [dict(labels) for labels, _ in self.matching(selector)]
        assert found, f"nothing matches {selector.prettify()}"
        (names,) = {frozenset(labels) for labels in found}
        unknown = {matcher.name for matcher in selector.matchers.matchers} - names
        assert not unknown, f"{selector.prettify()}: there is no label {unknown}"
        return {*names}

    def matching(self, selector: Any) -> Iterator[tuple[tuple[tuple[str, str], ...], float]]:
        for (name, labels), value in self._found.items():
            if name == selector.name and all(
                _matches(matcher, dict(labels).get(matcher.name, ""))
                for matcher in selector.matchers.matchers
            ):
                yield labels, value

    def _kind(self, sample: str) -> str:
        """gauge or counter: what a sample does, whatever its family."""
        family = re.sub("_(total|bucket|count|sum)$", "", sample)
        kind = self._types.get(sample) or self._types.get(family)
        assert kind is not None, f"there is no {sample}"
        return "gauge" if kind == "gauge" else "counter"

    def total(self, sample: str) -> float:
        return sum(value for (name, _), value in self._found.items() if name == sample)


def _matches(matcher: Any, value: str) -> bool:
    is_pattern = matcher.op in (MatchOp.Re, MatchOp.NotRe)
    is_equal = re.fullmatch(matcher.value, value) if is_pattern else matcher.value == value
    return bool(is_equal) == (matcher.op in (MatchOp.Equal, MatchOp.Re))
