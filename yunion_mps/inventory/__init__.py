"""What the host has: the GPUs, from NVML and sysfs together."""
