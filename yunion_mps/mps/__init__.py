"""One domain: NVIDIA's control daemon on one pipe directory, its limits, and its states."""
