"""Training of tasks, by gradients through the functions that serve them."""
