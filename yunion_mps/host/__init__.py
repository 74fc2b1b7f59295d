"""Operating system services: processes, threads, files, SQLite, systemd and the log."""
