"""The Zarr store of a run: its schema, its keys, the thread that writes it, and reading untrusted stores.

Imports no other folder, and no torch.
"""
