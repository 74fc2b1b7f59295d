"""Who has which device: leases, from a wish over the queue to their end."""
