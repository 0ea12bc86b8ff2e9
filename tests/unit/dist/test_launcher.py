"""Which launcher started this process, and where it stands in the launch."""

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.dist.launcher import read_environment
from aioengine.dist.launcher_env import (
    FIRST_RENDEZVOUS_PORT,
    NUM_RENDEZVOUS_PORTS,
    LauncherEnv,
    rendezvous_port,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
STEP = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "m[0-9],n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x12)",
}
ONE_NODE = {
    **STEP,
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "3",
}
BATCH_SHELL = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SALLOC_SHELL = {  # with LaunchParameters=use_interactive_step
    **BATCH_SHELL,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
MPIRUN_5 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-gpu-01-13701@1",
    "PMIX_HOSTNAME": "gpu-02",
    "PRTE_LAUNCHED": "1",
}
MPIRUN_4 = {
    **{name: value for name, value in MPIRUN_5.items() if name != "PRTE_LAUNCHED"},
    "PMIX_NAMESPACE": "749600769",
    "OMPI_MCA_orte_hnp_uri": "749600768.0;tcp://10.77.0.1,10.99.0.1:34877;tcp6://[fd00::2]:43219",
    "OMPI_MCA_orte_launch": "1",
}
DAEMON_STEP = {  # what ranks of mpirun inherit on further nodes of a Slurm job
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu-02",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_JOB_ID": "1234",
}


def place(env: LauncherEnv) -> tuple[Any, ...]:
    return env.kind, env.rank, env.world_size, env.local_rank, env.local_world_size, env.node


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- which one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({}, "none"),
        ({"MASTER_ADDR": "head", "MASTER_PORT": "29400"}, "none"),
        (TORCHRUN, "torchrun"),
        (STEP, "srun"),
        (MPIRUN_5, "openmpi"),
        ({**STEP, **TORCHRUN}, "torchrun"),
        ({**MPIRUN_5, **TORCHRUN}, "torchrun"),
        ({**without(MPIRUN_5, "PRTE_LAUNCHED"), **STEP}, "srun"),
        ({**MPIRUN_5, **STEP, "OMPI_COMM_WORLD_SIZE": "1"}, "srun"),  # srun inside of mpirun
        ({**MPIRUN_5, **DAEMON_STEP}, "openmpi"),
        ({**MPIRUN_4, **DAEMON_STEP}, "openmpi"),
        ({**MPIRUN_5, **BATCH_SHELL}, "openmpi"),
        ({**STEP, "WORLD_SIZE": "3", "MASTER_ADDR": "head"}, "srun"),
        ({**BATCH_SHELL, "SLURM_NTASKS": "1"}, "none"),
        ({**SALLOC_SHELL, "SLURM_NTASKS": "1"}, "none"),
        ({**without(STEP, "SLURM_PROCID"), **TORCHRUN}, "torchrun"),
        ({**STEP, "SLURM_STEP_ID": "?", "SLURM_NTASKS": "?", **TORCHRUN}, "torchrun"),
    ],
)
def test_first_complete_set_wins(environ: dict[str, str], kind: str) -> None:
    assert read_environment(environ).kind == kind


def test_the_log_line_says_what_was_used_and_what_was_not() -> None:
    echo = read_environment({**STEP, **TORCHRUN}).echo
    used, ignored = echo.split("; ignored srun: ")
    assert used.startswith("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=head MASTER_PORT=29400 ")
    assert ignored.startswith("SLURM_PROCID=2 SLURM_NTASKS=3 ")
    echo = read_environment(STEP).echo
    assert "SLURM_STEP_NODELIST=n[1-2]" in echo
    assert "; rendezvous n1:" in echo


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_incomplete_torchrun_set(name: str) -> None:
    with pytest.raises(ValueError, match=f"incomplete torchrun .* but not {name};"):
        read_environment(without(TORCHRUN, name))
    with pytest.raises(ValueError, match=f"incomplete torchrun .* but not {name};"):
        read_environment({**STEP, **without(TORCHRUN, name)})  # a step does not make it right


def test_a_world_size_alone_is_no_launch() -> None:
    with pytest.raises(ValueError, match="found WORLD_SIZE but not RANK, LOCAL_RANK, MASTER_ADDR"):
        read_environment({"WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"]
)
def test_incomplete_step(name: str) -> None:
    with pytest.raises(ValueError, match=f"incomplete srun environment: found .* but not {name};"):
        read_environment(without(STEP, name))


@pytest.mark.parametrize("shell", [BATCH_SHELL, SALLOC_SHELL])
def test_a_shell_with_several_tasks_is_no_step(shell: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="SLURM_NTASKS is 3 but this is no srun step"):
        read_environment(shell)


# --- torchrun ----------------------------------------------------------------------------------


def test_torchrun() -> None:
    env = read_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert place(env) == ("torchrun", 5, 8, 1, 4, "1")
    assert (env.master_addr, env.master_port) == ("head", 29400)
    assert env.agent_hosts_store
    assert not env.is_single_node


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("RANK", "²"),
        ("RANK", "9" * 5000),
        ("WORLD_SIZE", "four"),
        ("LOCAL_RANK", ""),
        ("LOCAL_RANK", "4"),
        ("LOCAL_WORLD_SIZE", "1.0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "0"),
    ],
)
def test_malformed_torchrun_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        read_environment({**TORCHRUN, name: value})


# --- srun --------------------------------------------------------------------------------------


def test_srun_over_nodes() -> None:
    env = read_environment(STEP)
    assert place(env) == ("srun", 2, 3, 0, 1, "1")
    assert env.master_addr == "n1"
    assert not env.hosts_store
    first = read_environment({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert place(first) == ("srun", 0, 3, 0, 2, "0")
    assert first.hosts_store
    assert (first.master_addr, first.master_port) == (env.master_addr, env.master_port)


def test_srun_on_one_node_meets_on_loopback() -> None:
    env = read_environment(ONE_NODE)
    assert place(env) == ("srun", 2, 3, 0, 3, "0")
    assert env.is_single_node
    assert env.master_addr == "127.0.0.1"


def test_srun_of_one_task_needs_no_rendezvous() -> None:
    environ = {**DAEMON_STEP, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}
    env = read_environment(without(environ, "SLURM_JOB_ID"))
    assert place(env) == ("srun", 0, 1, 0, 1, "0")
    assert not env.hosts_store


def test_srun_preserving_the_environment_of_the_job() -> None:
    """`srun -n2 --preserve-env` in an allocation of three tasks."""
    environ = {
        **STEP,
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert read_environment(environ).world_size == 2


def test_the_four_variables_of_a_step_are_enough_on_one_node() -> None:
    environ = {**ONE_NODE, "SLURM_LOCALID": "2"}
    environ = without(environ, "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
    assert place(read_environment(environ)) == ("srun", 2, 3, 2, 3, "0")


def test_hints_override_the_rendezvous_of_a_step() -> None:
    derived = read_environment(STEP)
    hinted = read_environment({**STEP, "MASTER_ADDR": "10.0.0.7"})
    assert (hinted.master_addr, hinted.master_port) == ("10.0.0.7", derived.master_port)
    hinted = read_environment({**STEP, "MASTER_PORT": "4444"})
    assert (hinted.master_addr, hinted.master_port) == ("n1", 4444)
    assert read_environment({**ONE_NODE, "MASTER_ADDR": "n1"}).master_addr == "n1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID 3 does not fit the 3 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS must be at least 1, found 0"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number, found 'x'"),
        ({"SLURM_NTASKS": "", "SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS must be a number"),
        ({"SLURM_LOCALID": "-1"}, "SLURM_LOCALID must be a number"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID 1 does not fit the 1 tasks of node 1"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID 2 does not fit the 2 hosts of SLURM_STEP_NODELIST"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID must be a number"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST: .*'n\[1-' at position 3"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: .* at position 1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE: .*'2\(x' at position"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "tells of 4 tasks on 2 nodes, .* has 3 .*on 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3"}, "tells of 3 tasks on 1 nodes, .* has 3 .*on 2"),
        ({"SLURM_JOB_ID": "12_3"}, "SLURM_JOB_ID must be a number"),
        ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID must be a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be between 1 and 65535"),
    ],
)
def test_malformed_step(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_environment({**STEP, **change})


def test_a_step_without_its_job_id_needs_a_port() -> None:
    environ = without(STEP, "SLURM_JOB_ID")
    with pytest.raises(ValueError, match="neither SLURM_JOB_ID nor MASTER_PORT"):
        read_environment(environ)
    assert read_environment({**environ, "MASTER_PORT": "4444"}).master_port == 4444


@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 100), st.integers(0, 60))
def test_steps_of_near_jobs_have_ports_of_their_own(
    job: int, step: int, later: int, other_step: int
) -> None:
    def port(job_id: int, step_id: int) -> int:
        ids = {"SLURM_JOB_ID": str(job_id), "SLURM_STEP_ID": str(step_id)}
        return read_environment({**STEP, **ids}).master_port

    assert port(job, step) == port(job, step)
    assert port(job, step) != port(job + later, other_step)
    assert (port(job, step) == port(job, other_step)) == (step == other_step)


@given(st.integers(0, 2**70))
def test_rendezvous_ports_are_none_that_kernels_hand_out(number: int) -> None:
    assert 15_000 <= rendezvous_port(number) < 29_000
    assert FIRST_RENDEZVOUS_PORT + NUM_RENDEZVOUS_PORTS <= 29_000


# --- Open MPI ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "host"), [(MPIRUN_5, "gpu-01"), (MPIRUN_4, "10.77.0.1")], ids=["5", "4"]
)
def test_mpirun_over_nodes(environ: dict[str, str], host: str) -> None:
    env = read_environment(environ)
    assert place(env) == ("openmpi", 2, 4, 0, 2, "gpu-02")
    assert env.master_addr == host
    assert env.master_port == read_environment({**environ, "PMIX_HOSTNAME": "x"}).master_port
    again = {"PMIX_NAMESPACE": environ["PMIX_NAMESPACE"].replace("7", "8")}
    assert env.master_port != read_environment({**environ, **again}).master_port
    hinted = read_environment({**environ, "MASTER_ADDR": "head", "MASTER_PORT": "4444"})
    assert (hinted.master_addr, hinted.master_port) == ("head", 4444)


def test_mpirun_on_one_node() -> None:
    environ = {**MPIRUN_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    env = read_environment(without(environ, "PMIX_HOSTNAME"))
    assert place(env) == ("openmpi", 2, 4, 2, 4, socket.gethostname())
    assert env.master_addr == "127.0.0.1"


def test_mpirun_of_one_process_needs_no_rendezvous() -> None:
    ones = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    env = read_environment({**MPIRUN_5, **ones, "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "?"})
    assert place(env) == ("openmpi", 0, 1, 0, 1, "gpu-02")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK 4 does not fit OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK 2 does not fit"),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE must be a number"),
        ({"PMIX_NAMESPACE": "749600769"}, "give mpirun -x MASTER_ADDR=HOST"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be a number"),
    ],
)
def test_malformed_mpirun(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_environment({**MPIRUN_5, **change})


def test_incomplete_mpirun() -> None:
    with pytest.raises(ValueError, match=r"incomplete mpirun .* not OMPI_COMM_WORLD_LOCAL_SIZE;"):
        read_environment(without(MPIRUN_5, "OMPI_COMM_WORLD_LOCAL_SIZE"))
    with pytest.raises(ValueError, match="give mpirun -x MASTER_PORT=PORT"):
        read_environment({**without(MPIRUN_5, "PMIX_NAMESPACE"), "MASTER_ADDR": "head"})


# --- beside the launcher -----------------------------------------------------------------------


def test_settings_that_are_no_launcher() -> None:
    settings = {"AIOENGINE_JOB_SECRET": "s", "AIOENGINE_HOST_IP": "", "OMP_NUM_THREADS": "4,2"}
    for environ in ({}, TORCHRUN, STEP, MPIRUN_5):
        env = read_environment({**environ, **settings})
        assert (env.job_secret, env.host_ip, env.omp_num_threads) == (b"s", None, 4)


def test_the_end_of_the_job_counts_under_every_launcher() -> None:
    for environ in ({}, TORCHRUN, STEP, MPIRUN_5):
        assert read_environment(environ).job_end is None
        assert read_environment({**environ, "SLURM_JOB_END_TIME": "0"}).job_end is None
        assert read_environment({**environ, "SLURM_JOB_END_TIME": "1799999999"}).job_end == 1.799999999e9
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME must be a number, found 'soon'"):
        read_environment({"SLURM_JOB_END_TIME": "soon"})
