"""`python -m yunion_mps.daemon` is yunion-mps-daemon."""

from yunion_mps.daemon import main

main()
