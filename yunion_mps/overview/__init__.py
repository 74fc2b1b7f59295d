"""Which process and lease has which device, and what is wrong, joined from the daemon's answers.

`status`, `who`, `top` and the web page all use it. It never queries the daemon itself.
"""
