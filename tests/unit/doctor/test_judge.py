"""Facts in, findings out: what is wrong is named with rank and host, what is right is not."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.examinations import (
    HEALTHY_DEVICE,
    block,
    change,
    examination,
    facts,
    person,
    slow_down,
)

from aioengine.doctor.examination import Clock, CutOff, Examination, Unheard
from aioengine.doctor.finding import Finding, spans
from aioengine.doctor.judge import exit_status, judge
from aioengine.doctor.messages import Cell, Timing

GPU = msgspec.structs.replace(HEALTHY_DEVICE, name="cuda:0 H200", device_id="GPU-1", num_threads=1)


def only(found: Examination, kind: str) -> Finding:
    """The only finding there is."""
    findings = judge(found)
    assert [finding.kind for finding in findings] == [kind], findings
    return findings[0]


@pytest.mark.parametrize("hosts", ["a", "aa", "aabb", "abc", "aaaabbbbccccdddd"])
def test_nothing_is_found_where_nothing_is_wrong(hosts: str) -> None:
    assert judge(examination(hosts)) == []
    assert exit_status([]) == 0


def test_warnings_come_after_faults_and_do_not_fail() -> None:
    found = examination("aa")
    change(found, 1, shm_free=0, shm_error="/dev/shm: Read-only file system")
    warning = only(found, "shm")
    assert exit_status([warning]) == 0
    found.ranks[1].left = "connection closed"
    kinds = [finding.kind for finding in judge(found)]
    assert kinds == ["left", "shm"]
    assert exit_status(judge(found)) == 1


# --- who came ------------------------------------------------------------------------------------


def without(found: Examination, rank: int) -> None:
    del found.ranks[rank]
    found.cells = [c for c in found.cells if rank not in (c.source, c.target)]


def test_a_missing_rank_is_named_with_its_place_and_the_host_of_its_node() -> None:
    found = examination("aabb", tp_size=2, pp_size=2)
    without(found, 3)
    finding = only(found, "missing")
    assert finding.severity == "fault"
    assert finding.ranks == (3,)
    assert finding.hosts == ("b",)
    assert "rank 3 (dp0 pp1 tp1) of 4 missing" in finding.text
    assert "--startup-timeout-seconds 30" in finding.text
    assert "Hosts seen: a, b." in finding.text
    assert "belongs on host b" in finding.text


def test_a_whole_node_that_is_missing_belongs_to_no_host_seen() -> None:
    found = examination("aabb")
    without(found, 2)
    without(found, 3)
    finding = only(found, "missing")
    assert finding.ranks == (2, 3)
    assert finding.hosts == ()
    assert "Hosts seen: a." in finding.text
    assert "No rank of the same node came" in finding.text


def test_missing_ranks_of_a_large_launch_are_counted() -> None:
    found = examination("a" * 40)
    for rank in range(10, 40):
        without(found, rank)
    text = next(f for f in judge(found) if f.kind == "missing").text
    assert "rank 17 (dp17 pp0 tp0), and 22 more of 40 missing" in text


def test_a_rank_that_is_there_twice_is_named_with_both_processes() -> None:
    found = examination("ab")
    found.again.append(person(1, "c", pid=77, world_size=2))
    finding = only(found, "twice")
    assert finding.severity == "fault"
    assert finding.ranks == (1,)
    assert finding.hosts == ("b", "c")
    assert "rank 1 is there twice: pid 1001 on host b and pid 77 on host c" in finding.text
    found.again.append(person(1, "c", pid=78, world_size=2))
    assert "3 times" in only(found, "twice").text


def test_a_process_of_another_launch_is_named() -> None:
    found = examination("ab")
    found.strays.append(person(5, "c", world_size=8))
    finding = only(found, "world_size")
    assert finding.hosts == ("c",)
    assert "one of 8 ranks" in finding.text
    assert "one of 2" in finding.text


def test_a_rank_cut_off_from_rank_0_is_not_called_missing() -> None:
    found = examination("ab")
    without(found, 1)
    found.cut_off.append(CutOff(facts=facts(1, "b"), reason="10.0.0.1:4 did not answer in 3 s"))
    finding = only(found, "cut_off")
    assert finding.ranks == (0, 1)
    assert "rank 1 on host b" in finding.text
    assert "rank 0 on host a" in finding.text
    assert "10.0.0.1:4 did not answer" in finding.text


@pytest.mark.parametrize(
    ("reason", "hint"), [("", "MTU"), ("undecodable frame", "version of aioengine")]
)
def test_a_rank_of_which_nothing_was_heard(reason: str, hint: str) -> None:
    found = examination("ab")
    without(found, 1)
    found.unheard[1] = Unheard("10.0.0.2", reason)
    finding = only(found, "unheard")
    assert "rank 1 at 10.0.0.2" in finding.text
    assert hint in finding.text


def test_silent_ranks_of_a_host_are_one_finding_and_explain_the_errors_of_others() -> None:
    found = examination("aabb", tp_size=2, pp_size=2)
    for rank in (2, 3):
        found.ranks[rank].silent_in = "the TCP matrix"
        block(found, 0, rank, failed="proof", error="no answer within 3 s")
    found.ranks[0].failed = "RuntimeError: timed out"
    found.ranks[1].stuck_in = "building the process groups"
    finding = only(found, "silent")
    assert finding.ranks == (2, 3)
    assert "ranks 2, 3 on host b, pid 1002, 1003" in finding.text


@pytest.mark.parametrize(("kind", "attribute"), [("left", "left"), ("stuck", "stuck_in")])
def test_a_rank_that_is_not_well_is_named(kind: str, attribute: str) -> None:
    found = examination("aabb")
    setattr(found.ranks[3], attribute, "what happened")
    finding = only(found, kind)
    assert finding.severity == "fault"
    assert finding.ranks == (3,)
    assert finding.hosts == ("b",)
    assert "what happened" in finding.text
    assert "pid 1003" in finding.text


def test_ranks_whose_groups_fail_alike_are_one_finding_behind_its_cause() -> None:
    found = examination("aabb", tp_size=2, pp_size=2)
    for rank in (2, 3):
        change(found, rank, variables={"GLOO_SOCKET_IFNAME": "ib0"})
        found.ranks[rank].failed = "Unable to find address for: ib0"
    findings = judge(found)
    assert [f.kind for f in findings] == ["interface", "groups"]
    assert all(f.ranks == (2, 3) for f in findings)
    assert "Unable to find address" in findings[1].text


def test_an_interruption_is_a_fault() -> None:
    found = examination("ab")
    without(found, 1)
    found.interrupted = "SIGTERM"
    findings = judge(found)
    assert [f.kind for f in findings] == ["interrupted", "missing"]
    assert "SIGTERM" in findings[0].text
    assert "within 2.0 s" in findings[1].text


# --- hosts ---------------------------------------------------------------------------------------


def changed(**changes: Any) -> Callable[[Examination], None]:
    """Rank 3, on host b, has these facts instead."""
    return lambda found: change(found, 3, **changes)


HOST_FINDINGS: dict[str, tuple[Callable[[Examination], None], str, str]] = {
    "loopback": (changed(address="127.0.0.1"), "fault", "loopback (127.0.0.1)"),
    "address": (changed(listen_error="[Errno 99]"), "fault", "cannot listen on its address"),
    "loopback_name": (
        lambda found: [change(found, r, host_resolves_to=("127.0.1.1",)) for r in (2, 3)] and None,
        "warning",
        "/etc/hosts",
    ),
    "interface": (
        changed(variables={"GLOO_SOCKET_IFNAME": "ib0"}),
        "fault",
        "no interface ib0 there, only lo, eth0",
    ),
    "memory": (changed(memory_free=2**28), "warning", "0.25 GiB"),
    "shm": (changed(shm_free=2**26 - 1, shm_total=2**26), "warning", "63 MiB free of 64"),
    "open_files": (changed(open_files=200), "warning", "may open 200 files"),
    "locked_memory": (
        changed(infiniband=("mlx5_0",), locked_memory=65536),
        "warning",
        "ulimit -l unlimited",
    ),
    "mtu": (changed(mtu=9000), "warning", "9000: rank 3 on host b"),
}


@pytest.mark.parametrize("kind", HOST_FINDINGS)
def test_what_is_wrong_with_a_host_is_named(kind: str) -> None:
    spoil, severity, text = HOST_FINDINGS[kind]
    found = examination("aabb")
    spoil(found)
    finding = only(found, kind)
    assert finding.severity == severity
    assert text in finding.text
    assert (
        "3 on host b" in finding.text or "host b, pid" in finding.text or "host b " in finding.text
    )


def test_loopback_is_right_when_all_ranks_are_on_one_host() -> None:
    found = examination("aa")
    for rank in (0, 1):
        change(found, rank, address="127.0.0.1", host_resolves_to=("127.0.1.1",))
    assert judge(found) == []


def test_two_containers_of_one_machine_do_not_share_a_loopback() -> None:
    found = examination("aa")
    change(found, 1, network="another namespace", address="127.0.0.1")
    assert only(found, "loopback").ranks == (1,)


def test_loopback_explains_the_ways_that_do_not_work() -> None:
    found = examination("ab")
    change(found, 1, address="127.0.0.1", rendezvous_resolves_to=("127.0.1.1",))
    block(found, 0, 1, failed="connect", error="[Errno 111] Connection refused")
    assert "the rendezvous host a means 127.0.1.1" in only(found, "loopback").text


def test_rank_0_on_loopback_is_found_through_those_that_cannot_reach_it() -> None:
    found = examination("aab")
    without(found, 2)
    change(found, 0, address="127.0.0.1")
    found.cut_off.append(CutOff(facts=facts(2, "b"), reason="[Errno 111] Connection refused"))
    assert {f.kind for f in judge(found)} == {"cut_off", "loopback"}


@pytest.mark.parametrize(
    ("value", "is_right"),
    [("eth0", True), ("lo,eth0", True), ("eth", True), ("^docker0", True), ("ib0", False)],
)
def test_nccl_interfaces_may_be_prefixes_and_exclusions(value: str, is_right: bool) -> None:
    found = examination("a")
    change(found, 0, variables={"NCCL_SOCKET_IFNAME": value})
    assert [f.kind for f in judge(found)] == ([] if is_right else ["interface"])


@pytest.mark.parametrize(
    ("field", "severity"), [("aioengine", "fault"), ("torch", "fault"), ("python", "warning")]
)
def test_versions_must_agree(field: str, severity: str) -> None:
    found = examination("aab")
    change(found, 2, **{field: "9.9"})
    finding = only(found, "versions")
    assert finding.severity == severity
    assert "9.9: rank 2 on host b" in finding.text
    assert "ranks 0, 1 on host a" in finding.text


def test_settings_that_differ_are_listed() -> None:
    found = examination("ab")
    found.ranks[1].differences = ("block_size: 16 != 32",)
    assert "block_size: 16 != 32" in only(found, "settings").text


def test_two_ranks_on_one_accelerator_are_named() -> None:
    found = examination("aab")
    for rank in range(3):
        found.ranks[rank].device = GPU
    finding = only(found, "device_shared")
    assert finding.severity == "fault"
    assert finding.ranks == (0, 1)


def test_a_rank_without_a_device_is_named() -> None:
    found = examination("ab")
    found.ranks[1].device = msgspec.structs.replace(GPU, error="torch finds no CUDA device")
    assert "torch finds no CUDA device" in only(found, "device").text


def test_more_ranks_than_cores() -> None:
    found = examination("aabb")
    for rank in (0, 1):
        change(found, rank, cores=(3,))
    finding = only(found, "cores")
    assert finding.ranks == (0, 1)
    assert "2 ranks share 1 core (3) of the 16 there" in finding.text


def test_ranks_with_cores_of_their_own_are_fine() -> None:
    found = examination("aa")
    change(found, 0, cores=(0, 1))
    change(found, 1, cores=(2, 3))
    assert judge(found) == []


def test_more_threads_than_cores() -> None:
    found = examination("aa")
    found.ranks[1].device = msgspec.structs.replace(HEALTHY_DEVICE, num_threads=15)
    finding = only(found, "threads")
    assert "17 compute threads for 16 cores (0-15)" in finding.text


def test_the_front_end_needs_files_for_its_clients() -> None:
    found = examination("ab")
    for rank in (0, 1):
        change(found, rank, open_files=1024)
    finding = only(found, "open_files")
    assert finding.ranks == (0,)
    assert "--max-concurrent-requests" in finding.text


@pytest.mark.parametrize(
    ("offset_ms", "error_ms", "text"),
    [
        (2500.0, 1.0, "2.5 s ahead of"),
        (-2500.0, 1.0, "2.5 s behind"),
        (2500.0, 2000.0, ""),
        (900.0, 0.0, ""),
    ],
)
def test_clock_skew_counts_beyond_what_is_uncertain(
    offset_ms: float, error_ms: float, text: str
) -> None:
    found = examination("aab")
    found.ranks[2].clock = Clock(offset_ms=offset_ms, error_ms=error_ms)
    if text:
        assert text in only(found, "clock").text
    else:
        assert judge(found) == []


def test_a_rank_that_computes_slowly_is_named() -> None:
    found = examination("abc")
    found.ranks[2].device = msgspec.structs.replace(HEALTHY_DEVICE, matmul_ms=9.0)
    finding = only(found, "slow_device")
    assert finding.ranks == (2,)
    assert finding.hosts == ("c",)
    assert "9.0 ms" in finding.text


def test_ranks_that_share_too_few_cores_are_not_called_slow_devices() -> None:
    found = examination("aaa")
    for rank in range(3):
        change(found, rank, cores=(0, 1))
    found.ranks[2].device = msgspec.structs.replace(HEALTHY_DEVICE, matmul_ms=9.0)
    only(found, "cores")


# --- ways ----------------------------------------------------------------------------------------


def test_a_blocked_direction_is_one_finding_for_two_hosts() -> None:
    found = examination("aabb")
    for source in (0, 1):
        for target in (2, 3):
            block(found, source, target, failed="connect", error="no answer within 3 s")
    finding = only(found, "blocked")
    assert finding.severity == "fault"
    assert finding.ranks == (0, 1, 2, 3)
    assert "rank 0 to rank 2" in finding.text
    assert "from host a (10.0.0.1) to host b (10.0.0.2)" in finding.text
    assert "port 40002: no answer within 3 s" in finding.text
    assert "firewall" in finding.text


def test_large_packets_that_are_lost_point_at_the_mtu() -> None:
    found = examination("ab")
    block(found, 0, 1, failed="load", error="128 KiB did not come back within 3 s")
    assert "MTU" in only(found, "blocked").text


def test_a_way_that_was_not_tried_is_no_finding() -> None:
    found = examination("ab")
    block(found, 0, 1, failed="untried", error="time was over")
    assert judge(found) == []


def test_a_slow_host_among_three_is_named() -> None:
    found = examination("aabcc")
    slow_down(found, 40_000.0, 3, 4)
    finding = only(found, "slow")
    assert finding.severity == "warning"
    assert finding.ranks == (3, 4)
    assert finding.hosts == ("c",)
    assert "40.0 ms" in finding.text
    assert "80 µs for the median" in finding.text


def test_two_hosts_that_are_far_from_each_other_are_named_together() -> None:
    found = examination("aabb")
    slow_down(found, 40_000.0, 2, 3)
    finding = only(found, "slow")
    assert finding.ranks == (0, 1, 2, 3)
    assert "ranks 0, 1 on host a and ranks 2, 3 on host b" in finding.text


def test_a_slow_rank_of_one_host_is_named() -> None:
    found = examination("aaaa")
    found.cells = [
        msgspec.structs.replace(cell, round_trip_us=9000.0)
        if 2 in (cell.source, cell.target)
        else cell
        for cell in found.cells
    ]
    assert only(found, "slow").ranks == (2,)


def test_one_slow_way_between_ranks_that_are_not_slow() -> None:
    found = examination("abcd")
    found.cells = [
        Cell(source=1, target=2, round_trip_us=7000.0) if (c.source, c.target) == (1, 2) else c
        for c in found.cells
    ]
    finding = only(found, "slow_way")
    assert "rank 1 (host b) to rank 2 (host c) 7.0 ms" in finding.text


def test_noise_of_a_busy_host_is_no_finding() -> None:
    found = examination("aaaa")
    found.cells = [
        msgspec.structs.replace(cell, round_trip_us=30.0 + 300.0 * (i % 7))
        for i, cell in enumerate(found.cells)
    ]
    assert judge(found) == []


def timing(ranks: tuple[int, ...], latency_us: float) -> Timing:
    return Timing(
        group="tp:0",
        ranks=ranks,
        operation="all_reduce",
        backend="gloo",
        latency_us=latency_us,
        gb_per_s=1.0,
    )


def test_a_slow_group_is_named() -> None:
    found = examination("aabbcc", tp_size=2)
    found.timings = [timing((0, 1), 400.0), timing((2, 3), 9000.0), timing((4, 5), 500.0)]
    finding = only(found, "slow_group")
    assert finding.hosts == ("b",)
    assert "tp group of ranks 2, 3 on host b" in finding.text


def test_a_tensor_parallel_group_that_crosses_hosts_is_named() -> None:
    found = examination("abab", tp_size=2, pp_size=2)
    finding = only(found, "crossing")
    assert finding.severity == "warning"
    assert "rank 0 on host a; rank 1 on host b" in finding.text
    assert judge(examination("aabb", tp_size=2, pp_size=2)) == []


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((0,), "0"), ((0, 1), "0, 1"), ((0, 1, 2), "0-2"), ((1, 4, 5, 6, 9), "1, 4-6, 9")],
)
def test_numbers_are_shown_as_spans(numbers: tuple[int, ...], text: str) -> None:
    assert spans(numbers) == text
