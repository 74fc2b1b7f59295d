"""What Prometheus reads, made from the service's answers and from counts: pure, without I/O of its own.

`facts` is what goes in, `catalogue` declares every metric with its samples, and `text` writes them with
prometheus_client, which nothing else here imports.
"""
