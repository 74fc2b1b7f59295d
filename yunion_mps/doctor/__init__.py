"""`yunion-mps doctor`: everything that makes MPS fail in the field, looked at one thing after the other.

A check is a function that takes the `Host` and returns findings; it changes nothing. `running` calls all of
them at once, each with a deadline, and makes the report. `docs/doctor.md` describes every check.
"""
