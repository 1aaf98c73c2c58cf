"""Starter data, so that a first training run and evaluation need no download; README.md describes the two files."""
