"""Whose turn it is: order, fairness, and when a batch starts."""
