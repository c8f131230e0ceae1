"""Models on torch: the only folder, with training and benchmarks, that imports it."""
