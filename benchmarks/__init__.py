"""Speed, shown as ratios and rates measured in one run: `python -m benchmarks.<name>`."""
