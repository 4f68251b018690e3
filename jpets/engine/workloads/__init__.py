"""Kinds of model: what an engine asks of each, and which ones there are."""
