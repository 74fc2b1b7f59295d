"""HTTP with JSON on a Unix socket: the server in the daemon, and the client of the command line."""
