"""The Open Inference Protocol v2: what HTTP and gRPC have in common, and its routes."""
