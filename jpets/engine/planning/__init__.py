"""Which waiting queries run next, and in which program."""
