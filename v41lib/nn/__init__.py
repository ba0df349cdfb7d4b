"""The mechanisms, one a file: tensors in, tensors out. Nothing here knows of caches, engines or files.

Axis letters, in every docstring: B batch, S queries, T keys, C compressed entries, H heads, D head width, M model
width, R residual streams, E experts, K selected entries.
"""
