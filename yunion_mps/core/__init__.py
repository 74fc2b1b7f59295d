"""Values and words that all packages share: this package imports no other one."""
