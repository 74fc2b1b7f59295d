"""Settings of GPUs: what each should have, what it had before, and what keeps it as it is."""
