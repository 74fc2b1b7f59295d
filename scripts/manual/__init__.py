"""What `scripts/generate` writes: man pages, completions, example files, in the programs' own words."""
