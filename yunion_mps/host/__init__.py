"""What the operating system offers: processes, threads, files, SQLite, systemd and the log."""
