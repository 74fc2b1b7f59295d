"""`yunion-mps top`: which process uses what, repainted until it is quit."""
