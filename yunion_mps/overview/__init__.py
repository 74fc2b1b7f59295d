"""Who has what and what is wrong, put together of the daemon's answers: the same words wherever it is shown.

Nothing here asks anybody: `status`, `who`, `top` and the web page hand in what they were told.
"""
