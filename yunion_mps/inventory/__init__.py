"""The host's GPUs, as NVML and sysfs report them."""
