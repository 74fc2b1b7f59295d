"""What a monitoring system is told, made from what the service says and from counts: pure, it asks nobody.

`facts` is what goes in, `catalogue` names every metric, `families` fills them, `use` says who uses how much,
and `text` writes them down with prometheus_client, which nothing else here imports.
"""
