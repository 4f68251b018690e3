"""Kinds of model: what an engine asks of one, and those that there are."""
