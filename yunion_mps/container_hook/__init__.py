"""The OCI hook that engines call before a container starts: it binds the device, or the start fails.

Called as `yunion-mps cdi-hook DEVICE` on the host, with the container's state on standard input (the OCI
runtime specification, "createRuntime"). `hook` is the program, and `container` reads what the engine says
about the container. Every such container waits for it, so it imports little: only the daemon's client.
"""
