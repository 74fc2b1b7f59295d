"""MIG on the simulated GPUs: which GPU instances a model can have, as data that the library serves.

Counts and engines are those of NVIDIA's MIG User Guide, "Supported MIG Profiles" (2026). Profile ids,
placements, SMs and memory are what people published of `nvidia-smi mig -lgip` and `-lgipp` on an A30 (driver
535), A100s, an H100 and an H100 NVL (driver 560), and an H200 (issue 120 of NVIDIA's mig-parted); drivers
differ a little in the memory. Of a B200, 1g and 2g are from mig-parted's pull request 187 (March 2025),
engines included; of 3g, 4g and 7g there was no output: their SMs are those of the mock in NVIDIA's go-nvml,
and their memory is an estimate. Placements of the H200 and B200 are taken to be an H100's.
"""

from __future__ import annotations

from typing import NamedTuple

# The memory slices at which an instance may start.
ALL_OF_7, PAIRS_OF_4, PAIRS_OF_3, HALVES, WHOLE = (0, 1, 2, 3, 4, 5, 6), (0, 2, 4, 6), (0, 2, 4), (0, 4), (0,)


class Profile(NamedTuple):
    """One GPU instance profile of a model."""

    name: str  # as nvidia-smi has it, without "MIG "
    number: int  # NVML_GPU_INSTANCE_PROFILE_*
    id: int  # what nvidia-smi mig -cgi takes
    slices: int  # of compute
    most: int  # instances at once
    memory_gib: float
    sm: int
    engines: tuple[int, int, int, int]  # copy, decoders, JPEG, OFA; no model here has encoders
    size: int  # memory slices
    starts: tuple[int, ...]


def _eight(names: str, gib: str, sm: str, engines: str) -> tuple[Profile, ...]:
    """Return the profiles of a model with eight memory slices; all have the same shape.

    `names` are the gigabytes of 1g, of 1g with twice the memory and 2g, of 3g and 4g, of 7g, and `gib` the
    same exactly; `sm` are those of 1g, 1g with twice the memory, 2g, 3g, 4g, 7g; `engines` (copy, decoders,
    JPEG) have 1g+me after 1g.
    """
    one, two, four, all_ = names.split()
    memory = [float(number) for number in gib.split()]
    sms = [int(number) for number in sm.split()]
    each = [(*map(int, digits.split("/")),) for digits in engines.split()]
    rows = (
        (f"1g.{one}gb", 0, 19, 1, 7, memory[0], sms[0], 0, 1, ALL_OF_7),
        (f"1g.{one}gb+me", 7, 20, 1, 1, memory[0], sms[0], 1, 1, ALL_OF_7),
        (f"1g.{two}gb", 9, 15, 1, 4, memory[1], sms[1], 0, 2, PAIRS_OF_4),
        (f"2g.{two}gb", 1, 14, 2, 3, memory[1], sms[2], 0, 2, PAIRS_OF_3),
        (f"3g.{four}gb", 2, 9, 3, 2, memory[2], sms[3], 0, 4, HALVES),
        (f"4g.{four}gb", 3, 5, 4, 1, memory[2], sms[4], 0, 4, WHOLE),
        (f"7g.{all_}gb", 4, 0, 7, 1, memory[3], sms[5], 1, 8, WHOLE),
    )
    return tuple(
        Profile(name, number, id_, slices, most, gib, sm, (ce, dec, jpeg, ofa), size, starts)
        for (name, number, id_, slices, most, gib, sm, ofa, size, starts), (ce, dec, jpeg) in zip(rows, each)
    )


_A100 = "14 14 28 42 56 98"
_HOPPER = "16 26 32 60 64 132"
_HOPPER_ENGINES = "1/1/1 1/1/1 1/1/1 2/2/2 3/3/3 4/4/4 8/7/7"

#: By the kind of GPU; a kind that is not here can have no instances.
PROFILES: dict[str, tuple[Profile, ...]] = {
    "a30": (
        Profile("1g.6gb", 0, 14, 1, 4, 5.8125, 14, (1, 1, 0, 0), 1, (0, 1, 2, 3)),
        Profile("1g.6gb+me", 7, 21, 1, 1, 5.8125, 14, (1, 1, 1, 1), 1, (0, 1, 2, 3)),
        Profile("2g.12gb", 1, 5, 2, 2, 11.6875, 28, (2, 2, 0, 0), 2, (0, 2)),
        Profile("2g.12gb+me", 8, 6, 2, 1, 11.6875, 28, (2, 2, 1, 1), 2, (0, 2)),
        Profile("4g.24gb", 3, 0, 4, 1, 23.4375, 56, (4, 4, 1, 1), 4, WHOLE),
    ),
    "a100": _eight(
        "5 10 20 40", "4.75 9.75 19.625 39.375", _A100, "1/0/0 1/1/1 1/1/0 2/1/0 3/2/0 4/2/0 7/5/1"
    ),
    "a100-80gb": _eight(
        "10 20 40 80", "9.5 19.5 39.25 79", _A100, "1/0/0 1/1/1 1/1/0 2/1/0 3/2/0 4/2/0 7/5/1"
    ),
    "h100": _eight("10 20 40 80", "9.75 19.625 39.5 79.25", _HOPPER, _HOPPER_ENGINES),
    "h100-nvl": _eight("12 24 47 94", "10.75 21.625 46.375 93.125", _HOPPER, _HOPPER_ENGINES),
    "h200": _eight("18 35 71 141", "16 32.25 69.5 139.75", _HOPPER, _HOPPER_ENGINES),
    "b200": _eight(
        "23 45 90 180",
        "20.5 44.25 89 178.5",
        "18 30 36 54 72 126",
        "2/1/1 2/1/1 2/1/1 4/2/2 6/1/1 8/1/1 16/1/1",
    ),
}

#: Ampere's driver applies a change of MIG mode with the next reset of the GPU; newer ones apply it at once.
NEED_A_RESET = {"a30", "a100", "a100-80gb"}

#: nvidia-smi compute-policy --set-timeslice takes their number.
TIME_SLICES = ("default", "short", "medium", "long")
