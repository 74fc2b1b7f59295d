"""Who uses what: processes, the leases that they belong to, MPS clients, and the use of GPUs and devices."""
