"""What programs take, measured and predicted."""
