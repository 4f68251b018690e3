"""Attacks, kills and long runs: ``PYTHONPATH=scripts python -m faults.NAME``."""
