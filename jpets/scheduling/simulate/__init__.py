"""Several devices that serve tasks and move them, simulated (multi-GPU PetS section 3.4).

Batches are planned by ``packed`` over a measured cost profile and moves by ``balance``, as for real: only time is
simulated. Numpy only.
"""
