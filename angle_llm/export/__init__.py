"""Merge, verify, export and upload a saved encoder. Each written form is compared with the trained encoder."""
