"""Devices for containers, as podman, docker, containerd and CRI-O find them: the Container Device Interface.

`spec` makes them, purely; `nodes` and `nvidia` say what there is of the GPUs, `files` keeps them where
engines look, and `hook` is what they call before a container starts. The format's specification is at
github.com/cncf-tags/container-device-interface.
"""

#: Tells the hook that the container has nothing of the device but its name.
UNSERVED = "--unserved"
