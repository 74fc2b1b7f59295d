"""Slurm: its hooks, which lease what it has assigned to a job, and the lines for its configuration.

Each share of a GPU is a gres `gpu:mps` with a character device of its own, so that Slurm names exactly the
devices of a job (`SLURM_JOB_GPUS`). Slurm chooses them; the daemon only has to agree.
"""
