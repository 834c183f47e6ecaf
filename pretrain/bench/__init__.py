"""Benchmarks against baselines; each module's `main(argv)` is one `./launch.sh bench NAME`."""
