"""Which users' jobs run at the same time, and what is said about it."""

from __future__ import annotations

import pytest
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import MULTIUSER_UNSUPPORTED
from yunion_mps.planning.multiuser import describe_users
from yunion_mps.planning.plan import make_plan

from unit import builders

MACHINE_ID = "0123456789abcdef0123456789abcdef"


def gpu(number: int, capability: tuple[int, int] | None = (8, 9)) -> Gpu:
    return builders.P40._replace(
        pci_address=f"0000:0{number}:00.0", uuid=f"GPU-{number}", compute_capability=capability
    )


def users(*gpus: Gpu, knows: bool | None = True, **keys: object) -> str:
    inventory = builders.inventory(*gpus)
    plan, problems = make_plan(builders.config(**keys), inventory, MACHINE_ID)
    assert not problems
    return describe_users(plan, inventory, knows_multiuser=knows)


def test_with_one_control_daemon_one_user_has_all_gpus() -> None:
    assert users(gpu(1), gpu(2)) == (
        "only one user's jobs run at a time on these 2 GPUs together; others wait. "
        "To run all users' jobs at the same time, set cuda_mps_multiuser: true in host.conf"
    )


def test_what_the_control_program_does_not_know_is_not_recommended() -> None:
    text = users(gpu(1), gpu(2), knows=False)
    assert "cuda_mps_multiuser" not in text
    assert "its NVIDIA control program does not support that (570 and later do)" in text
    assert text.endswith(
        "To have one user at a time on each GPU instead, set cuda_mps_scope: gpu in host.conf"
    )


def test_with_a_control_daemon_for_each_gpu_a_user_has_one_gpu() -> None:
    text = users(gpu(1), gpu(2), knows=False, cuda_mps_scope="gpu")
    assert text.startswith("only one user's jobs run at a time on each GPU; others wait. ")
    assert "cuda_mps_scope" not in text


def test_in_multiuser_mode_all_users_jobs_run_at_once() -> None:
    assert users(gpu(1), gpu(2), cuda_mps_multiuser=True) == "jobs of all users run at the same time"


def test_beside_a_gpu_without_multiuser_mode_those_with_it_are_named() -> None:
    text = users(gpu(1, (6, 1)), gpu(2), cuda_mps_multiuser=True, cuda_mps_scope="gpu")
    assert text == (
        "only one user's jobs run at a time on GPU 01:00.0; others wait; on GPU 02:00.0, jobs of all users "
        "run at the same time. The others wait because GPU 01:00.0 (Tesla P40) is older than Volta"
    )
    gpus = (gpu(1, (6, 1)), gpu(2), gpu(3, (6, 1)))
    text = users(*gpus, cuda_mps_multiuser=True, cuda_mps_scope="gpu")
    assert text.startswith("only one user's jobs run at a time on each of GPU 01:00.0, 03:00.0; others wait;")


def test_without_a_gpu_that_is_shared_through_mps_nothing_is_said() -> None:
    assert users() == ""


@pytest.mark.parametrize("capability", [(6, 1), None])
def test_before_volta_multiuser_mode_would_refuse_users_and_is_left_out(
    capability: tuple[int, int] | None,
) -> None:
    """A GPU beside it keeps the mode if it has a control daemon of its own."""
    gpus = (gpu(1), gpu(2, capability))
    for scope, modes in (("host", [False]), ("gpu", [True, False])):
        config = builders.config(cuda_mps_multiuser=True, cuda_mps_scope=scope)
        plan, _ = make_plan(config, builders.inventory(*gpus), MACHINE_ID)
        assert [domain.multiuser for domain in plan.domains] == modes
        (warning,) = plan.warnings
        assert warning.code == MULTIUSER_UNSUPPORTED
        how = "older than Volta" if capability else "of unknown compute capability"
        assert f"GPU 02:00.0 (Tesla P40) is {how}: " in warning
