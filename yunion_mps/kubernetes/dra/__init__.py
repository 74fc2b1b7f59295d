"""The DRA driver mps.yunion.io: the node's devices in ResourceSlices, and the leases of resource claims."""
