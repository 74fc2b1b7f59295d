"""Prometheus metrics, made from the service's facts.

`catalogue` declares every metric with its samples; `exporter` formats them with prometheus_client, which no
other module imports, answers scrapes and writes the file for node_exporter.
"""
