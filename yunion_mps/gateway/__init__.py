"""What is served over TCP, by a process without rights of its own: it asks the daemon over the Unix socket.

The daemon is root and never speaks to a network. It writes what host.conf opens to a file (`addresses`), a
module of its own because the daemon loads nothing else of the gateway. The gateway listens there and answers
(`server`), and asks the daemon (`client`).
"""
