"""`yunion-mps doctor`: checks for everything that makes MPS fail in the field.

`checks` defines what a check is, and the facts that checks use; `report` lists the checks and runs them, each
with a deadline. `docs/troubleshoot.md` describes every check.
"""
