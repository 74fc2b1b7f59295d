"""`yunion-mps doctor`: checks of everything that makes MPS fail in the field.

`host` is what a check gets and returns; `report` lists the checks and runs them, each with a deadline.
`docs/troubleshoot.md` lists every check.
"""
