"""Precomputed lookup tables (HMI's PLOT): vectors of token n-grams in place of a backbone's lower layers."""
