"""Five tasks over MiniLM, one per PET method, and their results; see ``scripts/experiments/demo_tasks.py``."""
