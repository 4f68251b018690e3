"""What clients speak: one file a protocol or resource."""
