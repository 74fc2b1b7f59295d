"""The kubelet plugin: offers this host's devices to pods, as a device plugin or as a DRA driver.

`service` is the program, `node` runs what serves the node for it, and `options` is its configuration file.
`device_plugin` and `dra` are the two ways to offer devices. Both use `kubelet`, which has the kubelet's APIs,
`api`, a client of the API server, and the daemon through its client.
"""
