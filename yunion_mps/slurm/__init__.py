"""Slurm: the hooks that lease what it assigns to jobs, and the lines for its configuration.

Each share of a GPU is a gres `gpu:mps` with a character device of its own, so that Slurm names exactly the
devices of a job (`SLURM_JOB_GPUS`). Slurm chooses the devices, and the daemon leases exactly these. With
gres/shard, Slurm chooses a GPU and a number of shards, and the daemon leases as many devices of this GPU.

Source: Slurm: Generic Resource (GRES) Scheduling, sections "Configuration" and "Sharding".
"""
