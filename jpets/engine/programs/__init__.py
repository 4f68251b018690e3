"""What can run: programs, what each is compiled for, and where they are kept."""
