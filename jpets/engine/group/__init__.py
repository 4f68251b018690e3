"""Several engines as one: each task has a home, and homes move."""
