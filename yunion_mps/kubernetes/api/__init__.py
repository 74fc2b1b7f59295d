"""The API server: credentials, a client, and the objects and quantities of its API."""
