"""The device plugin for the kubelet: offers this host's devices to pods, and leases them to containers.

`plugin` decides and answers, `service` is the program around it, `options` its configuration file. `grpc` and
`kubelet_api` are what the kubelet speaks. The daemon is reached through its client only.
"""
