"""Parts of `eval/speed.py`: a worker for each library, environments and processes, and the report of a comparison."""
