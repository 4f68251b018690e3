"""Training jobs: their folders, and the processes that do them."""
