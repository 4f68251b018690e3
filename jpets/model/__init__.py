"""Encoders in Flax NNX, split once into plain dicts and pure functions, and what runs on top of them."""
