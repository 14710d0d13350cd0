"""What the readers and modules for Linen and for NNX have in common; imports neither."""
