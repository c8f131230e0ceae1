"""The benchmarks behind `metrale bench`."""
