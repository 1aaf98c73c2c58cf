"""Parts of `eval/speed.py`: workers (one process per library), environments, watched processes, tables and the plot."""
