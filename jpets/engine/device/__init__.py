"""A device: parameters, banks and programs that are on it, and its memory."""
