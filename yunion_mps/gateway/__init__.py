"""What is served over TCP, by a process without rights of its own: it asks the daemon over the Unix socket.

The daemon is root and never speaks to a network. It writes down what host.conf opens (`notice`); the gateway
listens there (`doors`) and asks on (`upstream`). `metrics` is what Prometheus reads, `web` is the page.
"""
