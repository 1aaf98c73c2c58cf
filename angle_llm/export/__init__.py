"""Merge, verify, export and upload a saved encoder. Each form is compared with the encoder that was trained."""
