"""What scripts/package does: one staged tree, and from it a deb and an rpm with the same contents."""
