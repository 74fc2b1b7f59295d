"""The device plugin for the kubelet: offers this host's devices to pods, and leases them to containers.

`resources` decides what is offered, `leases` takes the leases of containers, and `plugin` answers; `service`
is the program around them, `options` its configuration file. `grpc` and `kubelet_api` are what the kubelet
speaks. The daemon is reached through its client only.
"""
