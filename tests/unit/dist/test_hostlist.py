"""Slurm's short forms, against fixed lists and a reference that spells everything out."""

import itertools
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.dist.hostlist import MAX_HOSTS, parse_hosts, parse_task_counts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [  # but for the suffix, what `scontrol show hostnames` of Slurm 22.05 answers
        ("gpu[01-04,7],x[1-2]n[3-4]", "gpu01 gpu02 gpu03 gpu04 gpu7 x1n3 x1n4 x2n3 x2n4"),
        ("a", "a"),
        ("a,b", "a b"),
        ("a[1-010]", "a1 a2 a3 a4 a5 a6 a7 a8 a9 a10"),
        ("a[001-3]", "a001 a002 a003"),
        ("a[9-11]b[01,2]", "a9b01 a9b2 a10b01 a10b2 a11b01 a11b2"),
        ("a[1-2][3-4]", "a13 a14 a23 a24"),
        ("n[1-3],n[2-4]", "n1 n2 n3 n2 n3 n4"),
        ("[1-3]", "1 2 3"),
        ("10.0.0.[8-10]", "10.0.0.8 10.0.0.9 10.0.0.10"),
        ("a[08-10]-ib.x", "a08-ib.x a09-ib.x a10-ib.x"),
    ],
)
def test_hosts(text: str, hosts: str) -> None:
    listed = parse_hosts(text)
    assert list(listed) == hosts.split()
    assert len(listed) == len(hosts.split())
    assert listed.first == hosts.split()[0]


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 1, "host name"),
        (",a", 1, "host name"),
        ("a,", 3, "host name"),
        ("a,,b", 3, "host name"),
        ("a b", 2, "host name"),
        ("a]", 2, "host name"),
        ("a[1]]", 5, "host name"),
        ("a[]", 3, "number"),
        ("a[1,]", 5, "number"),
        ("a[-3]", 3, "number"),
        ("a[1-]", 3, "number"),
        ("a[1-2-3]", 3, "number"),
        ("a[x]", 3, "number"),
        ("a[٣]", 3, "number"),
        ("a[1[2]]", 4, "expected in the bracket of position 2"),
        ("a[1-2", 6, "expected in the bracket of position 2"),
        ("a[1-2,", 7, "number"),
        ("a[4-1]", 3, "4-1 runs backwards"),
    ],
)
def test_malformed_hosts(text: str, position: int, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"at position {position}: .*{reason}") as caught:
        parse_hosts(text)
    assert repr(text) in str(caught.value)


def test_what_is_too_long_to_spell_out() -> None:
    assert parse_hosts(f"a[1-{MAX_HOSTS}]").first == "a1"
    for text in (f"a[0-{MAX_HOSTS}]", "a[1-999999999999999999]", "a[1-2000]b[1-2000]"):
        with pytest.raises(ValueError, match="more than 1048576"):
            parse_hosts(text)


texts = st.text(string.ascii_lowercase + string.digits + ".-_", min_size=1, max_size=4)
runs = st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4))
"""First number, how many follow, digits at least."""
patterns = st.lists(texts | st.lists(runs, min_size=1, max_size=3), min_size=1, max_size=4)


@given(st.lists(patterns, min_size=1, max_size=3))
def test_any_list(listed: list[list[str | list[tuple[int, int, int]]]]) -> None:
    """Written as Slurm writes it and spelled out the slow way, all brackets at once."""
    written, expected = [], []
    for pattern in listed:
        text, choices = "", []
        for part in pattern:
            if isinstance(part, str):
                text += part
                choices.append([part])
            else:
                spelled = [[str(n).zfill(w) for n in range(a, a + more + 1)] for a, more, w in part]
                text += f"[{','.join(s[0] if len(s) == 1 else f'{s[0]}-{s[-1]}' for s in spelled)}]"
                choices.append([number for numbers in spelled for number in numbers])
        written.append(text)
        expected += ["".join(parts) for parts in itertools.product(*choices)]
    hosts = parse_hosts(",".join(written))
    assert list(hosts) == expected
    assert len(hosts) == len(expected)


@given(st.text("a1[],- (x)", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_hosts, parse_task_counts):
        try:
            parse(text)
        except ValueError as error:
            assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,1(x2)", [1, 2, 1, 1]), ("8(x1)", [8])],
)
def test_task_counts(text: str, counts: list[int]) -> None:
    parsed = parse_task_counts(text)
    assert [parsed.on_node(node) for node in range(parsed.num_nodes)] == counts
    assert (parsed.num_nodes, parsed.num_tasks) == (len(counts), sum(counts))
    with pytest.raises(IndexError):
        parsed.on_node(len(counts))


@pytest.mark.parametrize(
    ("text", "position"),
    [("", 1), ("a", 1), ("2,", 3), (",2", 1), ("2(x3", 1), ("2(x)", 1), ("1,2(x3)1", 3), ("-1", 1)],
)
def test_malformed_task_counts(text: str, position: int) -> None:
    with pytest.raises(ValueError, match=f"at position {position}: "):
        parse_task_counts(text)
