"""Which device has which task."""
