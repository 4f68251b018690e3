"""Connections, bodies, errors and everything around a request."""
