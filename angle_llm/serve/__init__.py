"""Serve an encoder over HTTP, and check the vectors of a server."""
