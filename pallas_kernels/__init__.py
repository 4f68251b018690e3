"""Device operators, one folder each: ``api`` (what callers use), ``reference`` (plain XLA, right on every device)."""
