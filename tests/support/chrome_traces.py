"""Checks of a trace in Chrome's JSON format."""

from collections import defaultdict
from typing import Any

MICROSECONDS = 1e-3
"""Slack for times that are floats: a nanosecond."""


def check_trace(trace: dict[str, Any]) -> None:
    """Every event has what its phase needs, and spans of one thread lie in each other or apart."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "M"), event
        if event["ph"] == "M":
            assert event["args"], event
            named.add((event["pid"], event["tid"]))
        else:
            assert event["ts"] >= 0, event
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert tracks.keys() <= named
    for track, spans in tracks.items():
        check_nesting(track, spans)


def check_nesting(track: tuple[int, int], spans: list[tuple[float, float]]) -> None:
    open_ends: list[float] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin + MICROSECONDS:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + MICROSECONDS, (track, begin, end, open_ends)
        open_ends.append(end)


def spans_named(trace: dict[str, Any], name: str, pid: int) -> list[tuple[float, float]]:
    """Begin and end, in order."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith(name) and event["pid"] == pid
    )
