"""Training: what small models learn from, their losses, their optimisers, and the loop that survives being cut off."""
