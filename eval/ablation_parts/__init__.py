"""Parts of `eval/ablation.py`: grid files, measurements, the results file, and the saturation of loss terms."""
