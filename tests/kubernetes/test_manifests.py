"""The manifests: built by the real kubectl, of fields that Kubernetes has, and for this plugin."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from yunion_mps import __version__
from yunion_mps.core.paths import Paths
from yunion_mps.kubernetes.options import read_options

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "etc/kubernetes"
NAME = "yunion-mps-kubelet-plugin"

Object = dict[str, Any]

#: A member with any value, or a map of the user's own keys.
ANY: Object = {}
_META = dict.fromkeys(("name", "namespace", "labels"), ANY)
_SECURITY = dict.fromkeys(
    ("runAsUser", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities", "seccompProfile"), ANY
)
_CONTAINER = {
    **dict.fromkeys(("name", "image", "imagePullPolicy", "command", "args"), ANY),
    "env": {"name": ANY, "value": ANY, "valueFrom": {"fieldRef": {"fieldPath": ANY}}},
    "ports": {"name": ANY, "containerPort": ANY},
    "lifecycle": {"preStop": {"exec": {"command": ANY}}},
    "resources": {"limits": ANY, "requests": ANY, "claims": {"name": ANY, "request": ANY}},
    "securityContext": _SECURITY,
    "volumeMounts": {"name": ANY, "mountPath": ANY, "readOnly": ANY},
}
_POD = {
    **dict.fromkeys(
        (
            "serviceAccountName",
            "priorityClassName",
            "nodeSelector",
            "terminationGracePeriodSeconds",
            "restartPolicy",
        ),
        ANY,
    ),
    "tolerations": {"key": ANY, "operator": ANY, "effect": ANY},
    "containers": _CONTAINER,
    "resourceClaims": {"name": ANY, "resourceClaimName": ANY, "resourceClaimTemplateName": ANY},
    "volumes": {
        "name": ANY,
        "configMap": {"name": ANY},
        "hostPath": {"path": ANY, "type": ANY},
        "emptyDir": ANY,
    },
}
_TEMPLATED = {"selector": {"matchLabels": ANY}, "template": {"metadata": _META, "spec": _POD}}
_CEL = {"cel": {"expression": ANY}}
_EXACT_REQUEST = {
    "deviceClassName": ANY,
    "selectors": _CEL,
    "allocationMode": ANY,
    "count": ANY,
    "capacity": {"requests": ANY},
    "tolerations": ANY,
}
_CLAIM = {
    "devices": {
        "requests": {
            "name": ANY,
            "exactly": _EXACT_REQUEST,
            "firstAvailable": {"name": ANY, **_EXACT_REQUEST},
        },
        "constraints": {"requests": ANY, "matchAttribute": ANY, "distinctAttribute": ANY},
        "config": ANY,
    }
}
#: The members that are used, of the types in kubernetes.io/docs/reference/kubernetes-api.
TYPES: dict[tuple[str, str], Object] = {
    ("v1", "Namespace"): {},
    ("v1", "ServiceAccount"): {},
    ("v1", "ConfigMap"): {"data": ANY},
    ("v1", "Pod"): {"spec": _POD},
    ("apps/v1", "DaemonSet"): {"spec": _TEMPLATED},
    ("apps/v1", "Deployment"): {"spec": {"replicas": ANY, **_TEMPLATED}},
    ("rbac.authorization.k8s.io/v1", "ClusterRole"): {
        "rules": {"apiGroups": ANY, "resources": ANY, "verbs": ANY}
    },
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"): {
        "roleRef": {"apiGroup": ANY, "kind": ANY, "name": ANY},
        "subjects": {"kind": ANY, "name": ANY, "namespace": ANY},
    },
    ("resource.k8s.io/v1", "DeviceClass"): {"spec": {"selectors": _CEL}},
    ("resource.k8s.io/v1", "ResourceClaim"): {"spec": _CLAIM},
    ("resource.k8s.io/v1", "ResourceClaimTemplate"): {"spec": {"metadata": _META, "spec": _CLAIM}},
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"): {
        "spec": {
            "failurePolicy": ANY,
            "matchConstraints": {
                "resourceRules": dict.fromkeys(("apiGroups", "apiVersions", "operations", "resources"), ANY)
            },
            "matchConditions": {"name": ANY, "expression": ANY},
            "variables": {"name": ANY, "expression": ANY},
            "validations": {"expression": ANY, "messageExpression": ANY},
        }
    },
    ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding"): {
        "spec": {"policyName": ANY, "validationActions": ANY}
    },
}


def unknown_members(value: Any, members: Object, place: str = "") -> list[str]:
    """The members that no type has, by their paths."""
    if isinstance(value, list):
        return [path for one in value for path in unknown_members(one, members, f"{place}[]")]
    if not members or not isinstance(value, dict):
        return []
    found = []
    for name, member in value.items():
        path = f"{place}.{name}"
        found += unknown_members(member, members[name], path) if name in members else [path]
    return found


def kustomized(directory: Path) -> list[Object]:
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("kubectl is missing: apt-get install kubernetes-client")
    command = [kubectl, "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def loaded(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture(scope="module")
def manifests() -> list[Object]:
    return kustomized(MANIFESTS)


def only_object(objects: list[Object], kind: str) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


EXAMPLES = sorted((MANIFESTS / "examples").glob("*.yaml"))


@pytest.mark.processes
@pytest.mark.parametrize("path", [MANIFESTS, MANIFESTS / "dra", *EXAMPLES], ids=lambda path: path.stem)
def test_the_manifests_are_objects_of_known_fields(path: Path) -> None:
    objects = loaded(path) if path in EXAMPLES else kustomized(path)
    assert objects
    for each in objects:
        kind = {"apiVersion": ANY, "kind": ANY, "metadata": _META, **TYPES[each["apiVersion"], each["kind"]]}
        assert unknown_members(each, kind) == []


def test_the_pods_of_the_examples_request_our_resources(tmp_path: Path) -> None:
    offered = {*read_options(Paths(str(tmp_path))).resources.values()}
    requested = set()
    for each in (each for path in EXAMPLES for each in loaded(path)):
        spec = each["spec"].get("template", each)["spec"] if each["kind"] in ("Pod", "Deployment") else {}
        for container in spec.get("containers", ()):
            requested |= container.get("resources", {}).get("limits", {}).keys()
    assert requested == offered


def test_a_misspelt_field_is_found() -> None:
    pod = {"spec": {"containers": [{"name": "main", "resource": {}}]}}
    assert unknown_members(pod, {"spec": _POD}) == [".spec.containers[].resource"]


@pytest.mark.processes
def test_every_path_of_the_plugin_is_mounted(manifests: list[Object]) -> None:
    pod = only_object(manifests, "DaemonSet")["spec"]["template"]["spec"]
    hosts = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    paths = Paths()
    for path, is_written in (
        (paths.kubelet_plugin, False),
        (paths.socket, False),
        (f"{paths.device_plugins}/yunion-mps-0.sock", True),
        (paths.pod_resources, False),
        ("/var/lib/kubelet/plugins/mps.yunion.io", True),
        ("/var/lib/kubelet/plugins_registry/mps.yunion.io-reg.sock", True),
        ("/etc/kubernetes/node-feature-discovery/features.d/yunion-mps", True),
    ):
        (mount,) = (mounts[place] for place in mounts if path.startswith(f"{place}/"))
        assert mount.get("readOnly", False) is not is_written, path
        assert hosts[mount["name"]] in (None if path == paths.kubelet_plugin else mount["mountPath"],), path
    assert container["image"].endswith(f":{__version__}")


@pytest.mark.processes
def test_the_configuration_in_the_manifests_is_valid(manifests: list[Object], tmp_path: Path) -> None:
    pod = only_object(manifests, "DaemonSet")["spec"]["template"]["spec"]
    configuration = only_object(manifests, "ConfigMap")
    named = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    assert named == [configuration["metadata"]["name"]]
    (tmp_path / "etc/yunion").mkdir(parents=True)
    for name, text in configuration["data"].items():
        (tmp_path / "etc/yunion" / name).write_text(text)
    assert list(configuration["data"]) == ["kubelet-plugin.yml"]
    assert read_options(Paths(str(tmp_path))) == read_options(Paths(str(tmp_path / "defaults")))


@pytest.mark.processes
def test_the_plugin_has_the_least_rights_and_no_capabilities(manifests: list[Object]) -> None:
    objects = [*manifests, *kustomized(MANIFESTS / "dra")]
    rights = {
        (resource, verb)
        for role in objects
        if role["kind"] == "ClusterRole"
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    read = ("get", "list", "watch")
    assert rights == {
        *((resource, verb) for resource in ("pods", "nodes") for verb in read),
        ("resourceclaims", "get"),
        *(("resourceslices", verb) for verb in (*read, "create", "update", "delete")),
    }
    pod = only_object(manifests, "DaemonSet")["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    security = pod["containers"][0]["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)


@pytest.mark.processes
def test_the_roles_are_bound_to_the_service_account(manifests: list[Object]) -> None:
    objects = [*manifests, *kustomized(MANIFESTS / "dra")]
    account = only_object(objects, "ServiceAccount")["metadata"]
    pod = only_object(manifests, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["name"]
    bindings = [each for each in objects if each["kind"] == "ClusterRoleBinding"]
    assert {binding["roleRef"]["name"] for binding in bindings} == {
        role["metadata"]["name"] for role in objects if role["kind"] == "ClusterRole"
    }
    user = {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    assert [binding["subjects"] for binding in bindings] == [[user]] * len(bindings)
    policy = only_object(objects, "ValidatingAdmissionPolicy")["spec"]
    name = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    assert policy["matchConditions"][0]["expression"] == f'request.userInfo.username == "{name}"'


def test_the_image_contains_both_packages() -> None:
    text = (MANIFESTS / "Containerfile").read_text()
    (copied,) = re.findall(r"^COPY (.+) /tmp/$", text, re.MULTILINE)
    assert copied.split() == ["yunion-mps-daemon_*_${TARGETARCH}.deb", f"{NAME}_*_${{TARGETARCH}}.deb"]
    assert f'ENTRYPOINT ["/usr/bin/{NAME}"]' in text
    assert f"--tag {NAME}:{__version__} " in text
