"""Training small models of the same architecture: what they learn from, and what they are compared with."""
