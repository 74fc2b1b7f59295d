"""Generate man pages, completions and example files from the programs, for `scripts/generate`."""
