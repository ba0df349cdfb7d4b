"""Training: what turns gradients into steps."""
