"""Five tasks over MiniLM, one per PET method, and their results; made by ``scripts/train_demo_tasks.py``."""
