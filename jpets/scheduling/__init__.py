"""Batching policies as pure functions over plain data; numpy only."""
