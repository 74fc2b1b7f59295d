"""host_local.conf, whose values replace those of host.conf, as for Cloudpods' host agent."""

from __future__ import annotations

import pytest
from yunion_mps.cli.config import config_json, config_text
from yunion_mps.config import load
from yunion_mps.core.settings import Source

from unit.config.conftest import DEVICES, HOST, LOCAL, Files


def test_values_of_host_local_conf_replace_those_of_host_conf(files: Files) -> None:
    files.write(
        "enable_cuda_mps: false\ncuda_mps_replicas: 3\ncuda_mps_scope: gpu\n",
        local="# of this host\nenable_cuda_mps: true\ncuda_mps_replicas: 4\n",
    )
    config = files.load()
    assert (config.enable_cuda_mps, config.cuda_mps_replicas, config.cuda_mps_scope) == (True, 4, "gpu")
    assert config.sources["cuda_mps_replicas"] == Source(str(files.local), 3)
    assert config.sources["cuda_mps_scope"] == Source(str(files.host), 3)


@pytest.mark.parametrize("local", ["", "# nothing yet\n", "region: Yunion\n", "---\n"])
def test_a_host_local_conf_without_our_keys_changes_nothing(files: Files, local: str) -> None:
    assert files.write(local=local).load().enable_cuda_mps is True


def test_the_files_that_exist_are_named_in_the_order_of_reading(files: Files) -> None:
    assert files.write().load().files == (str(files.host),)
    files.write(devices="devices: []\n", local="")
    assert files.load().files == (str(files.host), str(files.local), str(files.devices))


def test_config_check_names_the_file_of_each_value_and_all_files(files: Files) -> None:
    files.write("enable_cuda_mps: false\ncuda_mps_replicas: 4\n", local="enable_cuda_mps: true\n")
    record = config_json(files.load())
    both = [str(files.host), str(files.local)]
    assert record["keys"]["enable_cuda_mps"] == {"value": True, "from": f"{files.local}:1"}
    assert record["keys"]["cuda_mps_replicas"] == {"value": 4, "from": f"{files.host}:2"}
    assert record["files"] == both
    assert config_text(files.load()).splitlines()[-3:] == ["FILE", *both]


def test_problems_of_host_local_conf_name_that_file_after_host_conf_s(files: Files) -> None:
    files.write(
        "a: b\ncuda_mps_replicas: 0\n", local="enable_cuda_mp: true\ncuda_mps_scope: all\n", devices="[]\n"
    )
    assert files.messages() == [
        f"{HOST}:2: cuda_mps_replicas is 0, out of range: write a whole number from 1 to 60",
        f"{LOCAL}:1: unknown key enable_cuda_mp (did you mean enable_cuda_mps?)",
        f'{LOCAL}:2: cuda_mps_scope is "all", but must be host or gpu',
        f"{DEVICES}:1: contains an empty list, not a mapping: begin the file with devices:",
    ]


def test_a_wrong_value_is_named_although_host_local_conf_replaces_it(files: Files) -> None:
    """Cloudpods' host agent exits because of it, too."""
    files.write("enable_cuda_mps: maybe\n", local="enable_cuda_mps: true\n")
    assert [problem.file for problem in files.problems()] == [str(files.host)]


def test_an_invalid_host_local_conf_leaves_the_values_of_host_conf(files: Files) -> None:
    config, problems = load(files.write("cuda_mps_scope: gpu\n", local="[\n").paths)
    assert config.cuda_mps_scope == "gpu"
    assert [problem.file for problem in problems] == [str(files.local)]


def test_the_override_in_host_local_conf_bounds_host_conf_s_number(files: Files) -> None:
    files.write("cuda_mps_replicas: 96\n", local="cuda_mps_max_clients: 96\n")
    assert files.load().cuda_mps_replicas == 96


def test_checks_across_both_files_name_the_file_of_the_value(files: Files) -> None:
    files.write("metrics_listen: 127.0.0.1:9434\n", local="\nweb_listen: 127.0.0.1:9434\n")
    (problem,) = files.problems()
    assert (problem.file, problem.line) == (str(files.local), 2)


def test_host_conf_names_another_local_file(files: Files) -> None:
    files.write("local_config_file: /etc/mine.conf\n", local="enable_cuda_mps: true\n")
    assert files.load().enable_cuda_mps is False
    files.root.joinpath("etc/mine.conf").write_text(
        "cuda_mps_scope: gpu\nlocal_config_file: /etc/mine.conf\n"
    )
    config = files.load()
    assert (config.cuda_mps_scope, config.local_config_file) == ("gpu", "/etc/mine.conf")
    assert config.sources["local_config_file"] == Source(str(files.host), 1)


def test_an_empty_name_means_that_there_is_no_local_file(files: Files) -> None:
    files.write('local_config_file: ""\n', local="enable_cuda_mps: true\n")
    assert files.load().enable_cuda_mps is False


def test_a_local_file_cannot_name_another_one(files: Files) -> None:
    files.write(local="local_config_file: /etc/other.conf\n")
    what = "local_config_file has no effect in this file"
    assert files.messages() == [f"{LOCAL}:1: {what}: set it in host.conf, or remove it"]


def test_an_empty_device_file_key_means_the_default_file(files: Files) -> None:
    entry = "devices:\n- {path: 00:06.0, type: NVIDIA_MPS, virtual_number: 4}\n"
    for host, local in (
        ('container_device_config_file: ""\n', None),
        ("container_device_config_file: ''\n", None),
        ("container_device_config_file: /etc/missing.yml\n", 'container_device_config_file: ""\n'),
    ):
        config = files.write(host, entry, local).load()
        assert [one.path for one in config.devices] == ["00:06.0"]
        assert config.sources["container_device_config_file"] == Source("default", None)
        assert files.write(host, None, local).load().devices == ()
