"""The podman of a simulated host shares nothing with that of another one, such as another worker's."""

from __future__ import annotations

import contextlib
from pathlib import Path

from containers.image import IMAGE
from containers.podman_host import Podman, Store
from integration.conftest import MakeHost


def groups_around(pid: int) -> set[str]:
    """The control groups in which the engine has made those of a container, as the machine sees them."""
    found = set()
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        path, separator, _ = line.partition("/libpod-")
        if separator:
            found.add(path)
    return found


def test_the_containers_of_two_hosts_have_no_control_group_in_common(
    make_host: MakeHost, tmp_path: Path
) -> None:
    found = []
    with contextlib.ExitStack() as stack:
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            podman = stack.enter_context(Podman(make_host(), Store(folder)))
            podman.good("run", "--detach", "--name", name, IMAGE, "sleep", "300")
            found.append(groups_around(podman.pid_of(name)))
    first, second = found
    assert first
    assert second
    assert first.isdisjoint(second)
