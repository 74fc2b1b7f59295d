"""The plugin's configuration file and its command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.enums import SHARING
from yunion_mps.core.errors import ConfigError
from yunion_mps.core.paths import Paths
from yunion_mps.kubernetes.device_plugin.lease_names import lease_name
from yunion_mps.kubernetes.device_plugin.resources import preferred
from yunion_mps.kubernetes.options import KEYS, NamedConfiguration, PluginOptions, read_options

from kubernetes.conftest import Read, RunProgram
from kubernetes.kubelet import MEMORY, RESOURCE

DEFAULTS = PluginOptions("yunion.io/mps", None, None, False, "binpack", "yunion.io/mps-memory", None)
GPU_OF = {f"{gpu}-{slot}": gpu for gpu, slots in (("a", 4), ("b", 2), ("c", 3)) for slot in range(slots)}


def test_every_key_has_a_default(tmp_path: Path, read: Read) -> None:
    assert read_options(Paths(str(tmp_path))) == DEFAULTS
    assert read("") == read("# nothing\n") == DEFAULTS
    assert len(KEYS) == len(DEFAULTS)


def test_the_page_explains_every_key_with_its_default() -> None:
    page = Path(__file__).parents[2].joinpath("docs/kubernetes-device-plugin.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", page, re.MULTILINE))
    written = {"False": "false", "None": "not set"}
    defaults = {name: str(key.default) for name, key in KEYS.items()}
    assert rows == {name: written.get(default, default) for name, default in defaults.items()}


def test_every_key_is_read(read: Read) -> None:
    options = read(
        "resource: example.com/gpu-share\ntimeSlicedResource: nvidia.com/gpu.shared\n"
        "gpuResource: nvidia.com/gpu\n"
        "failRequestsGreaterThanOne: true\npreferred: spread\n"
        "memoryResource: aliyun.com/gpu-mem\nmemoryUnit: 128MiB\n"
        "dra: true\nkubeconfig: /etc/kubernetes/kubelet.conf\nnodeName: gpu-7.example\n"
        "metricsAddress: localhost:9436\nfeatureFile: /etc/features.d/mps\n"
        "deviceListStrategy: environment\nmigStrategy: mixed\nonlyWithNodeLabel: mps\n"
        "configs: {a: {preferred: binpack}}\n"
    )
    assert options == PluginOptions(
        "example.com/gpu-share", "nvidia.com/gpu.shared", "nvidia.com/gpu", True, "spread",
        "aliyun.com/gpu-mem", 128, True,
        "/etc/kubernetes/kubelet.conf", "gpu-7.example", "127.0.0.1:9436", "/etc/features.d/mps",
        "environment", "mixed", "mps",
        (NamedConfiguration("a", (), options._replace(configs=(), preferred="binpack")),),
    )  # fmt: skip


def test_all_problems_are_reported_at_once(tmp_path: Path, read: Read) -> None:
    with pytest.raises(ConfigError) as caught:
        read(
            "resource: mps\ngpuResources: a.b/c\npreferred: spraed\nreplicas: 4\n"
            "failRequestsGreaterThanOne: 2\nfailRequestsGreaterThanOne: true\n"
        )
    told = caught.value.message.replace(f"{tmp_path}/etc/yunion/kubelet-plugin.yml:", "").splitlines()
    valid, name = "; the valid keys are " + ", ".join(KEYS), "failRequestsGreaterThanOne"
    assert told[0].startswith('1: resource is "mps", not the name of an extended resource: write a domain')
    assert told[1:] == [
        "2: unknown key gpuResources (did you mean gpuResource?)",
        '3: preferred is "spraed", but must be binpack or spread: did you mean spread?',
        f"4: unknown key replicas: remove it{valid}",
        f"5: {name} is 2, not true or false: write {name}: true or {name}: false",
        f"6: duplicate key {name}: keep one of the two (the other is line 5)",
    ]


@pytest.mark.parametrize(
    "text",
    ["- 1\n", "a: [\n", "resource: {}\n", "resource: kubernetes.io/x\n", "metricsAddress: 0.0.0.0:9436\n"],
)
def test_an_invalid_value_is_reported_with_its_line(read: Read, text: str) -> None:
    with pytest.raises(ConfigError, match=r"kubelet-plugin.yml:\d: "):
        read(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{preferred: spread, preferred: binpack}\n", "duplicate key preferred"),
        ("configs: {a: {}, a: {}}\n", "duplicate configuration a"),
        ("configs: {}\n", "configs is a mapping, not a mapping of one or more configurations"),
        ("configs: {a: {models: [1]}}\n", "models is a list, not a list of one or more model names"),
        ("? [a]\n: 1\n", "unknown key a list"),
        (f"resource: {'a' * 60}.{'.'.join(['b' * 60] * 4)}/x\n", "not the name of an extended resource"),
        ("resource: requests.io/x\n", "not the name of an extended resource"),
        (f"onlyWithNodeLabel: {'a' * 64}\n", "write a name of at most 63 characters"),
        (f"onlyWithNodeLabel: a={'b' * 64}\n", "write a value of at most 63 characters"),
        (f"onlyWithNodeLabel: {'.'.join(['b' * 60] * 5)}/a\n", "write a domain of at most 253 characters"),
        ("featureFile: /etc/features.d/.mps\n", "a hidden file, which NFD does not read"),
    ],
)
def test_what_looks_right_but_is_not_is_explained(read: Read, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "resource: nvidia.com/gpu\n",
            "resource and gpuResource are both nvidia.com/gpu: set gpuResource to",
        ),
        ("resource: x.y/gpu.shared\n", "resource and timeSlicedResource are both x.y/gpu.shared: set timeSl"),
        ("gpuResource: a.b/c\ntimeSlicedResource: a.b/c\n", "timeSlicedResource and gpuResource are both"),
        ("memoryResource: yunion.io/gpu\n", "gpuResource and memoryResource are both yunion.io/gpu: set mem"),
        ("migStrategy: mixed\ngpuResource: yunion.io/mig-1\n", "gpuResource is yunion.io/mig-1, which migS"),
        ("configs: {a: {gpuResource: yunion.io/mps}}\n", "resource and gpuResource are both yunion.io/mps"),
    ],
)
def test_devices_of_different_kinds_have_resources_of_their_own(read: Read, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(text)


@pytest.mark.parametrize(
    ("strategy", "profile", "names"),
    [
        ("single", None, ["mps", "gpu.shared", "gpu"]),
        ("single", "1g.10gb", ["mps", "gpu.shared", "gpu"]),
        ("mixed", None, ["mps", "gpu.shared", "gpu"]),
        ("mixed", "1g.10gb", ["mig-1g.10gb.mps", "mig-1g.10gb.shared", "mig-1g.10gb"]),
        ("mixed", "1g.10gb+me", ["mig-1g.10gb.me.mps", "mig-1g.10gb.me.shared", "mig-1g.10gb.me"]),
        ("none", None, ["mps", "gpu.shared", "gpu"]),
        ("none", "1g.10gb", [None, None, None]),
    ],
)
def test_the_way_of_sharing_and_the_profile_choose_the_resource(
    strategy: str, profile: str | None, names: list[str | None]
) -> None:
    options = DEFAULTS._replace(mig_strategy=strategy)
    expected = [name and f"yunion.io/{name}" for name in names]
    assert [options.resource_of(sharing, profile) for sharing in SHARING] == expected


def test_a_pod_can_serve_its_metrics_to_the_cluster(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    for address in ("0.0.0.0:9436", "[::]:9436"):
        assert read(f'metricsAddress: "{address}"\n').metrics_address == address


OURS = "yunion-mps-kubelet-plugin: "


def test_a_valid_file_passes_the_check(run_program: RunProgram, read: Read) -> None:
    assert run_program("--check") == (0, [])
    read("preferred: spread\n")
    assert run_program("--check") == (0, [])


def test_the_check_refuses_a_kubeconfig_that_cannot_be_read(run_program: RunProgram, read: Read) -> None:
    read("kubeconfig: /nonexistent\n")
    status, told = run_program("--check")
    assert (status, "kubeconfig: /nonexistent cannot be read: " in told[0]) == (6, True)


def test_a_problem_has_its_line_its_code_and_the_command_that_checks(
    tmp_path: Path, run_program: RunProgram, read: Read
) -> None:
    with pytest.raises(ConfigError):
        read("preferred: 1\n")
    place = f"{tmp_path}/etc/yunion/kubelet-plugin.yml:1"
    told = [
        f"{OURS}{place}: preferred is 1, but must be binpack or spread [invalid_configuration]",
        f"{OURS}fix these lines, then run: yunion-mps-kubelet-plugin --check",
    ]
    assert run_program("--check") == run_program() == (6, told)


def test_wrong_usage_of_the_plugin_is_worded_as_for_yunion_mps(run_program: RunProgram) -> None:
    see = f"{OURS}see: yunion-mps-kubelet-plugin --help"
    assert run_program("--chekc") == (2, [f"{OURS}no such option: --chekc (did you mean --check?)", see])
    assert run_program("now") == (2, [f"{OURS}got unexpected extra argument (now)", see])
    status, (line,) = run_program("--version")
    assert (status, line.split()[0]) == (0, "yunion-mps-kubelet-plugin")


@pytest.mark.parametrize(
    ("required", "size", "placement", "chosen"),
    [
        ([], 1, "binpack", "b-0"),
        ([], 1, "spread", "a-0"),
        ([], 3, "binpack", "c-0 c-1 c-2"),
        ([], 4, "spread", "a-0 a-1 a-2 a-3"),
        ([], 5, "binpack", "a-0 a-1 a-2 a-3 b-0"),
        (["c-1"], 2, "binpack", "c-1 c-0"),
        (["b-1"], 4, "spread", "b-1 b-0 a-0 a-1"),
        (["b-1"], 1, "spread", "b-1"),
        ([], 20, "binpack", " ".join([*sorted(GPU_OF)[:4], "c-0", "c-1", "c-2", "b-0", "b-1"])),
        ([], 0, "binpack", ""),
    ],
)
def test_devices_of_few_gpus_are_preferred(
    required: list[str], size: int, placement: str, chosen: str
) -> None:
    assert preferred(list(GPU_OF), required, size, GPU_OF, placement) == chosen.split()


@pytest.mark.parametrize(
    ("available", "required", "size", "placement", "chosen"),
    [
        ("a-g1 b-g1 b-g2", "", 1, "spread", "b-g1"),
        ("a-g1 a-g2 b-g1", "", 1, "binpack", "b-g1"),
        ("a-g1 b-g1 b-g2", "", 2, "spread", "b-g1 b-g2"),
        ("a-g1 b-g1 b-g2 b-g3", "", 2, "binpack", "b-g1 b-g2"),
        ("a-g1-0 a-g1-1 b-g1-0 b-g2-0", "", 2, "spread", "a-g1-0 a-g1-1"),
        ("a-g1-0 b-g1-0 b-g2-0 b-g2-1", "", 1, "spread", "b-g2-0"),
        ("a-0 b-g1-0 b-g2-0", "", 2, "binpack", "b-g1-0 b-g2-0"),
        ("a-0 b-g1-0 c-0", "", 2, "binpack", "a-0 c-0"),
        ("a-0 b-g1-0 b-g1-1 c-0 c-1", "a-0", 3, "binpack", "a-0 c-0 c-1"),
        ("b-0 b-1 a-g1-0 a-g2-0", "a-g1-0", 2, "binpack", "a-g1-0 a-g2-0"),
        ("a-0 b-g1-0", "", 2, "binpack", "a-0 b-g1-0"),
    ],
)
def test_instances_are_preferred_by_their_gpu_and_not_mixed_with_gpus(
    available: str, required: str, size: int, placement: str, chosen: str
) -> None:
    names = available.split()
    of = {name: gpu_of(name) for name in names}
    assert preferred(names, required.split(), size, of, placement) == chosen.split()


def test_a_lease_s_name_is_that_of_its_resource_and_devices() -> None:
    first, second = "00:06.0-0", "00:06.0-1"
    assert lease_name(RESOURCE, [second, first]) == lease_name(RESOURCE, [first, second])
    assert lease_name(RESOURCE, [first]) != lease_name(RESOURCE, [second])
    assert lease_name(RESOURCE, [first]) != lease_name(MEMORY, [first])
    assert len(lease_name(RESOURCE, [first])) == 27
