"""The plan: which control daemons, devices and limits the configuration asks of the GPUs found."""
