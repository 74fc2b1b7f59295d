"""Makes the JSON schemas of the API's answers out of their types."""
