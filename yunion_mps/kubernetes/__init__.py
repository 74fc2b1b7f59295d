"""The kubelet plugin: offers this host's devices to pods, as a device plugin or as a DRA driver.

As a device plugin, `resources` decides what is offered, `leases` takes the leases of containers, and `plugin`
answers the kubelet; as a DRA driver, the modules `dra_*` do. `service` is the program, `node` runs one or the
other for it, and `options` is its configuration file. `grpc` and `kubelet_api` are what the kubelet speaks;
`api_server` is a client of the API server. The daemon is only reached through its client.
"""
