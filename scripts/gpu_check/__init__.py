"""What NVIDIA MPS does on a real GPU: see docs/gpu/README.md."""
