"""`yunion-mps doctor`: checks of everything that makes MPS fail in the field.

`report` declares and runs checks, each with a deadline; `checks` lists the modules that have them; `host` is
what they look at. `docs/doctor.md` describes every check.
"""
