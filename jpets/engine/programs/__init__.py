"""What can run: programs, the shapes each is compiled for, and their store."""
