from __future__ import annotations

from unit.config.conftest import DEVICES, HOST, Files


def test_the_problems_of_both_files_are_reported_together_host_conf_first(files: Files) -> None:
    files.write(
        "cuda_mps_scope: hots\nenable_cuda_mps: maybe\n",
        "devices:\n- {path: a, type: NVIDIA_MPS, virtual_number: 0}\n- 4\n",
    )
    assert files.messages() == [
        f'{HOST}:1: cuda_mps_scope is "hots", none of host, gpu: write host',
        (
            f'{HOST}:2: enable_cuda_mps is "maybe", not true or false:'
            " write enable_cuda_mps: true or enable_cuda_mps: false"
        ),
        f"{DEVICES}:2: virtual_number is 0, out of range: write a whole number from 1 to 60, without quotes",
        (
            f"{DEVICES}:3: an entry of devices is 4, not a mapping:"
            " write - path: …, type: … and virtual_number: …"
        ),
    ]


def test_an_unreadable_host_conf_hides_no_problem_of_the_device_file(files: Files) -> None:
    files.write("[\n", "devices: {}\n")
    problems = files.problems()
    assert [(problem.file, problem.line) for problem in problems] == [
        (str(files.host), 1),
        (str(files.devices), 1),
    ]


def test_a_wrong_path_of_the_device_file_is_the_only_problem(
    files: Files,
) -> None:
    files.write("container_device_config_file: 4\n", "devices: []\n")
    assert files.messages() == [
        (
            f"{HOST}:1: container_device_config_file is 4, not a text:"
            " write container_device_config_file: followed by a text"
        )
    ]


def test_the_problems_of_a_device_file_in_another_place_name_that_place(files: Files) -> None:
    files.write("container_device_config_file: /etc/d.yml\n", "devices: broken\n")
    files.root.joinpath("etc/d.yml").write_text("devices: 4\n")
    assert files.messages() == [
        "/etc/d.yml:1: devices is 4, not a list: write each entry after a dash: - path: …"
    ]


def test_values_without_a_problem_are_kept_beside_those_with_one(files: Files) -> None:
    from yunion_mps.config import load

    files.write("cuda_mps_scope: gpu\ncuda_mps_replicas: 0\n")
    config, problems = load(files.paths)
    assert (config.cuda_mps_scope, config.cuda_mps_replicas, len(problems)) == ("gpu", 10, 1)
