"""Groups of students on an engine: each student is a task of it, and the pooled vectors are added on the host."""
