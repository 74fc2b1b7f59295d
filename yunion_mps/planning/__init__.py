"""The pure plan: control daemons, devices and limits, from the configuration and the GPUs found."""
