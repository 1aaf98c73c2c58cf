"""The parts of `eval/speed.py`: workers (one process for each library), their environments, the watch over them, the report."""
