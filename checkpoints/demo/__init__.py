"""Five tasks over MiniLM, one per PET method, and their results; made by ``scripts/experiments/demo_tasks.py``."""
