"""What is known: the tasks of an engine, and which slots they have."""
