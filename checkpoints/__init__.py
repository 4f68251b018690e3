"""Backbones, task files and the task repository on disk: reading, checking, converting and storing them."""
