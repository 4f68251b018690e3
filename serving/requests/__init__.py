"""From a request to a checked body, and from its queries to a response."""
