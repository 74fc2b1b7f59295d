"""What `status`, `top` and `who` have in common: who has what, what is wrong, and how a screen shows it."""
