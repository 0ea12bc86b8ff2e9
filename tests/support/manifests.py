"""The Kubernetes manifests under launch/, as a cluster reads them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "launch" / "kubernetes"
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def workload(path: Path) -> dict[str, Any]:
    """The one document that makes pods."""
    (found,) = (document for document in documents(path) if document["kind"] != "Service")
    return found


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """That of the pods which serve HTTP first."""
    spec = document["spec"]
    if document["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [spec["template"]]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return found


def command(template: dict[str, Any], variables: Mapping[str, str]) -> list[str]:
    """With $(NAME) replaced, as the kubelet does; a KeyError for a variable that is not there."""
    return [
        re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word)
        for word in container(template)["command"]
    ]
