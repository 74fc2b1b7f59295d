"""Containers: their devices by the Container Device Interface, and which one a process is in.

`spec` makes a CDI specification, `publisher` keeps the files where podman, docker, containerd and CRI-O find
them, and `hook` is what these call before a container starts. `lookup` finds the container of a process, and
`command` reads the options of `docker run`. The format's specification is at
github.com/cncf-tags/container-device-interface.
"""

#: The container's budget, in its environment; CUDA does not read it.
MEMORY_VARIABLE, SM_VARIABLE = "YUNION_MPS_MEMORY_MIB", "YUNION_MPS_SM_PERCENT"

#: Tells the hook that the CDI device has only the environment and the hook, because its GPU is lost.
UNSERVED_ARGUMENT = "--unserved"
