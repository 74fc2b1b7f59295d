"""yunion-mps: NVIDIA MPS as a service."""

__version__ = "0.1.0"
