"""What is served over TCP, by a process without rights of its own: it asks the daemon over the Unix socket.

The daemon is root and never speaks to a network. It writes what host.conf opens to a file (`addresses`); the
gateway listens there (`listeners`), answers (`handlers`) and asks the daemon (`client`).
"""
