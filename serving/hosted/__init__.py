"""What is served: services, and the repository they follow."""
