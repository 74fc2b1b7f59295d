"""What scripts/package does: it stages what nfpm makes the deb and the rpm of, for each kind of processor."""
