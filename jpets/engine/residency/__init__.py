"""Tasks come to the device when queries ask for them, and leave it for others."""
