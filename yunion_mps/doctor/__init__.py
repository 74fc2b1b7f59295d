"""`yunion-mps doctor`: checks for everything that makes MPS fail in the field.

`checks` defines what a check is, and the facts that checks use; `report` lists and runs them.
`docs/troubleshoot.md` describes every check.
"""
