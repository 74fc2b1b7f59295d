"""The simulated driver in a machine: what its programs find where NVIDIA's driver would have put it.

No variable tells anybody of it: the daemon, nvidia-smi and the control daemon are as on a real host. Its
state, which a real driver has in the kernel, lies below /dev as the driver's nodes do.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from simhost import Description, SimHost
from simhost.mps import CONTROL, SERVER, built_server

#: Where the driver's folder is seen in the machine.
_PLACE = "/dev/simhost"
#: systemd-nspawn mounts /sys last, so the machine does this itself, before any service.
_MOUNT = f"""\
[Unit]
DefaultDependencies=no
Before=sysinit.target
[Mount]
What={_PLACE}/pci
Where=/sys/bus/pci/devices
Type=none
Options=bind
"""
_LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
_CLIENT = Path(__file__).parents[1] / "simhost/mps_client.py"
#: A stand-in for a CUDA program, in the machine.
CLIENT = "/opt/mps_client.py"


class Driver:
    """The GPUs of a machine, their library, and NVIDIA's programs; `host.gpus` has them from outside."""

    def __init__(self, folder: Path, description: Description | None = None) -> None:
        self.host = SimHost.create(description, root=folder)
        self._folder = folder
        (folder / "pci").mkdir(exist_ok=True)
        self.show_bus()
        self.binds = {folder: _PLACE, folder / "dev/dri": "/dev/dri"}

    def show_bus(self) -> None:
        """Show the machine which devices are on the PCI bus now, and their drivers.

        It sees copies, because the links of sysfs lead to parts of /sys that it does not have.
        """
        shown = self._folder / "pci"
        for name in os.listdir(shown):
            shutil.rmtree(shown / name)
        devices = self._folder / "sys/bus/pci/devices"
        for name in os.listdir(devices):
            shutil.copytree(devices / name, shown / name, symlinks=True)

    def install(self, root: Path) -> None:
        """Put library and programs into the machine whose files lie below `root`."""
        for name in ("libnvidia-ml.so.1", "simhost.state"):
            (root / _LIBRARIES / name).symlink_to(f"{_PLACE}/lib/{name}")
        units = root / "etc/systemd/system"
        (units / "sys-bus-pci-devices.mount").write_text(_MOUNT)
        (units / "sysinit.target.wants").mkdir(exist_ok=True)
        (units / "sysinit.target.wants/sys-bus-pci-devices.mount").symlink_to("../sys-bus-pci-devices.mount")
        for name in (CONTROL, "nvidia-smi"):
            found = shutil.which(name, path=self.host.env["PATH"])
            if found is None:
                raise FileNotFoundError(f"{name} is not there: run scripts/setup")
            shutil.copy(found, root / "usr/bin" / name)
        # Static, for the machine's C library may be older than the one here.
        shutil.copy(built_server("-static"), root / "usr/bin" / SERVER)
        asks = b"get_server_status" in (root / "usr/bin" / CONTROL).read_bytes()
        (root / "usr/bin/behaviour").write_text("asked" if asks else "")
        shutil.copy(_CLIENT, root / CLIENT.lstrip("/"))

    def load(self) -> None:
        """Be as after the boot: compute modes do not survive it."""
        for gpu in self.host.gpus:
            gpu.compute_mode = "default"

    @property
    def modes(self) -> list[str]:
        return [gpu.compute_mode for gpu in self.host.gpus]
