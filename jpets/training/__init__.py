"""Training of tasks, by gradients through the functions that also serve them."""
