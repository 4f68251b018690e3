"""Experiments that train tasks, each in a module of its own."""
