"""What NVIDIA MPS does on a real GPU, measured: see docs/gpu/README.md."""
