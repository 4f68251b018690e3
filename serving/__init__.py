"""HTTP front ends of one engine: protocols, task management, health, metrics, the status page."""
