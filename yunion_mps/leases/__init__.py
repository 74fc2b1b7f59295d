"""Who has which device: leases, from a request over the queue to their end."""
