"""Readers of data files: a class for each file type, and a class for BEIR folders."""
