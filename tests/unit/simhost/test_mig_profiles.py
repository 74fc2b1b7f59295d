"""The profiles and placements of each model with MIG, as nvidia-smi and pynvml list them."""

from __future__ import annotations

import pytest

from unit.simhost.conftest import MakeHost, nvml, rows, smi

# What `nvidia-smi mig -lgip` printed on such a board (simhost/mig.py tells from where): name, id, instances,
# memory, P2P, SMs, decoders, encoders; copy engines, JPEG, OFA. Of the B200, only 1g and 2g are; of the rest,
# names, counts and engines are those of NVIDIA's MIG User Guide.
A30 = """\
1g.6gb 14 4/4 5.81 No 14 1 0 1 0 0
1g.6gb+me 21 1/1 5.81 No 14 1 0 1 1 1
2g.12gb 5 2/2 11.69 No 28 2 0 2 0 0
2g.12gb+me 6 1/1 11.69 No 28 2 0 2 1 1
4g.24gb 0 1/1 23.44 No 56 4 0 4 1 1
"""
A100 = """\
1g.5gb 19 7/7 4.75 No 14 0 0 1 0 0
1g.5gb+me 20 1/1 4.75 No 14 1 0 1 1 1
1g.10gb 15 4/4 9.75 No 14 1 0 1 0 0
2g.10gb 14 3/3 9.75 No 28 1 0 2 0 0
3g.20gb 9 2/2 19.62 No 42 2 0 3 0 0
4g.20gb 5 1/1 19.62 No 56 2 0 4 0 0
7g.40gb 0 1/1 39.38 No 98 5 0 7 1 1
"""
A100_80GB = """\
1g.10gb 19 7/7 9.50 No 14 0 0 1 0 0
1g.10gb+me 20 1/1 9.50 No 14 1 0 1 1 1
1g.20gb 15 4/4 19.50 No 14 1 0 1 0 0
2g.20gb 14 3/3 19.50 No 28 1 0 2 0 0
3g.40gb 9 2/2 39.25 No 42 2 0 3 0 0
4g.40gb 5 1/1 39.25 No 56 2 0 4 0 0
7g.80gb 0 1/1 79.00 No 98 5 0 7 1 1
"""
H100 = """\
1g.10gb 19 7/7 9.75 No 16 1 0 1 1 0
1g.10gb+me 20 1/1 9.75 No 16 1 0 1 1 1
1g.20gb 15 4/4 19.62 No 26 1 0 1 1 0
2g.20gb 14 3/3 19.62 No 32 2 0 2 2 0
3g.40gb 9 2/2 39.50 No 60 3 0 3 3 0
4g.40gb 5 1/1 39.50 No 64 4 0 4 4 0
7g.80gb 0 1/1 79.25 No 132 7 0 8 7 1
"""
H100_NVL = """\
1g.12gb 19 7/7 10.75 No 16 1 0 1 1 0
1g.12gb+me 20 1/1 10.75 No 16 1 0 1 1 1
1g.24gb 15 4/4 21.62 No 26 1 0 1 1 0
2g.24gb 14 3/3 21.62 No 32 2 0 2 2 0
3g.47gb 9 2/2 46.38 No 60 3 0 3 3 0
4g.47gb 5 1/1 46.38 No 64 4 0 4 4 0
7g.94gb 0 1/1 93.12 No 132 7 0 8 7 1
"""
H200 = """\
1g.18gb 19 7/7 16.00 No 16 1 0 1 1 0
1g.18gb+me 20 1/1 16.00 No 16 1 0 1 1 1
1g.35gb 15 4/4 32.25 No 26 1 0 1 1 0
2g.35gb 14 3/3 32.25 No 32 2 0 2 2 0
3g.71gb 9 2/2 69.50 No 60 3 0 3 3 0
4g.71gb 5 1/1 69.50 No 64 4 0 4 4 0
7g.141gb 0 1/1 139.75 No 132 7 0 8 7 1
"""
B200 = """\
1g.23gb 19 7/7 20.50 No 18 1 0 2 1 0
1g.23gb+me 20 1/1 20.50 No 18 1 0 2 1 1
1g.45gb 15 4/4 44.25 No 30 1 0 2 1 0
2g.45gb 14 3/3 44.25 No 36 2 0 4 2 0
3g.90gb 9 2/2 89.00 No 54 1 0 6 1 0
4g.90gb 5 1/1 89.00 No 72 1 0 8 1 0
7g.180gb 0 1/1 178.50 No 126 1 0 16 1 1
"""
# What `-lgipp` printed.
OF_FOUR = """\
GPU  0 Profile ID 14 Placements: {0,1,2,3}:1
GPU  0 Profile ID 21 Placements: {0,1,2,3}:1
GPU  0 Profile ID  5 Placements: {0,2}:2
GPU  0 Profile ID  6 Placements: {0,2}:2
GPU  0 Profile ID  0 Placement : {0}:4
"""
OF_EIGHT = """\
GPU  0 Profile ID 19 Placements: {0,1,2,3,4,5,6}:1
GPU  0 Profile ID 20 Placements: {0,1,2,3,4,5,6}:1
GPU  0 Profile ID 15 Placements: {0,2,4,6}:2
GPU  0 Profile ID 14 Placements: {0,2,4}:2
GPU  0 Profile ID  9 Placements: {0,4}:4
GPU  0 Profile ID  5 Placement : {0}:4
GPU  0 Profile ID  0 Placement : {0}:8
"""
BOARDS = {
    "a30": (A30, OF_FOUR),
    "a100": (A100, OF_EIGHT),
    "a100-80gb": (A100_80GB, OF_EIGHT),
    "h100": (H100, OF_EIGHT),
    "h100-nvl": (H100_NVL, OF_EIGHT),
    "h200": (H200, OF_EIGHT),
    "b200": (B200, OF_EIGHT),
}


@pytest.mark.parametrize("kind", BOARDS)
def test_profiles_and_placements_are_those_of_the_board(make_host: MakeHost, kind: str) -> None:
    host = make_host([{"kind": kind, "mig": True}])
    profiles, placements = BOARDS[kind]
    assert rows(smi(host, "mig", "-lgip")) == profiles.splitlines()
    assert smi(host, "mig", "-lgipp") == placements


@pytest.mark.parametrize("kind", BOARDS)
def test_pynvml_has_the_same_profiles(make_host: MakeHost, kind: str) -> None:
    found = {}
    with nvml(make_host([{"kind": kind}])) as (n, gpu):  # MIG mode may be off
        for number in range(n.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = n.nvmlDeviceGetGpuInstanceProfileInfo(gpu, number)
            except n.NVMLError_NotSupported:
                continue
            assert n.nvmlDeviceGetGpuInstanceProfileInfoById(gpu, info.id).name == info.name
            assert n.nvmlDeviceGetGpuInstanceProfileInfo(gpu, number, version=1).id == info.id
            found[info.id] = f"{info.name} {info.instanceCount} {info.multiprocessorCount}"
        with pytest.raises(n.NVMLError_InvalidArgument):
            n.nvmlDeviceGetGpuInstanceProfileInfo(gpu, n.NVML_GPU_INSTANCE_PROFILE_COUNT)
    expected = (row.split() for row in BOARDS[kind][0].splitlines())
    assert found == {int(row[1]): f"MIG {row[0]} {row[2][-1]} {row[5]}" for row in expected}


@pytest.mark.parametrize("kind", BOARDS)
def test_of_each_profile_its_number_of_instances_fits(make_host: MakeHost, kind: str) -> None:
    with nvml(make_host([{"kind": kind, "mig": True}])) as (n, gpu):
        for row in BOARDS[kind][0].splitlines():
            profile, most = int(row.split()[1]), int(row.split()[2][-1])
            made = []
            while n.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile):
                made.append(n.nvmlDeviceCreateGpuInstance(gpu, profile))
            with pytest.raises(n.NVMLError_InsufficientResources):
                n.nvmlDeviceCreateGpuInstance(gpu, profile)
            assert len(made) == most
            for instance in made:
                n.nvmlGpuInstanceDestroy(instance)
