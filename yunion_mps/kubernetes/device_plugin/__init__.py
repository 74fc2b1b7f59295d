"""The device plugins: the extended resources of the node, offered to the kubelet and leased to containers."""
