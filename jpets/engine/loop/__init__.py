"""The threads that run one device."""
