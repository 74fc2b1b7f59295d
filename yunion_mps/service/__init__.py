"""The use cases, each once: what HTTP, metrics, container files, the web page and the command line call."""
