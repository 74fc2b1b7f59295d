"""Prometheus metrics, made from the service's facts.

`catalogue` declares every metric with its samples; `text` formats them with prometheus_client, which no other
module imports; `exporter` answers scrapes and writes the file for node_exporter.
"""
