"""`python -m yunion_mps.cli` is yunion-mps."""

from yunion_mps.cli import main

main()
