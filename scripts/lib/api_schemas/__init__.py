"""Generate the JSON schemas of the API's responses from their types."""
