"""Serves metrics and the web page over TCP, in an unprivileged process.

The daemon runs as root and never speaks to a network. It writes the addresses to a file (`addresses`, a
separate module because the daemon loads no other part of the gateway). The gateway listens there (`server`)
and queries the daemon over the Unix socket (`client`).
"""
