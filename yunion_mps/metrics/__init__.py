"""What Prometheus reads, made from the service's facts.

`catalogue` declares every metric with its samples, `text` writes them with prometheus_client, which nothing
else here imports; `exporter` answers scrapes, and writes the file for node_exporter.
"""
