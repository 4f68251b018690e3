"""Puts the parts together: the only folder that imports all of them."""
