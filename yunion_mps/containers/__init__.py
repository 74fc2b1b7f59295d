"""Containers: their devices by the Container Device Interface, and which one a process is in.

`spec` makes a CDI specification, `publisher` keeps the files where podman, docker, containerd and CRI-O find
them, and `hook` is what these call before a container starts. `lookup` finds the container of a process. The
format's specification is at github.com/cncf-tags/container-device-interface.
"""

#: Tells the hook that the container has nothing of the device but its name.
UNSERVED_ARGUMENT = "--unserved"
